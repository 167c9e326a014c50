"""Answer normalisation and bag-of-tokens F1, as SQuAD defined them (Rajpurkar et al., 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")

# The Chinese punctuation that LongBench drops, as code point ranges. The set has gaps: U+300A is
# not in it while U+300B is, and U+FF0E is missing.
_CHINESE = (
    "\uff01-\uff0d\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff64\u3001-\u3003\u300b-\u3011"
    "\u3014-\u301f\u3030\u303e\u303f\u2013\u2014\u2018\u2019\u201b-\u201f\u2026\u2027\ufe4f"
)
_CHINESE_OR_ASCII = re.compile(f"[{_CHINESE}{re.escape(string.punctuation)}\\s]+")


def normalise(text: str, *, lower: bool = True) -> str:
    """Without ASCII punctuation, articles and repeated spaces; lower case unless told otherwise."""
    text = text.lower() if lower else text
    return " ".join(_ARTICLES.sub(" ", text.translate(_PUNCTUATION)).split())


def normalise_zh(text: str) -> str:
    """Lower case, without Chinese and ASCII punctuation and without any space."""
    return _CHINESE_OR_ASCII.sub("", text.lower())


def token_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """F1 of the two bags of tokens; 0 when they share none."""
    shared = sum((Counter(prediction) & Counter(reference)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def qa_f1(prediction: str, reference: str) -> float:
    """Token F1 after `normalise`."""
    return token_f1(normalise(prediction).split(), normalise(reference).split())
