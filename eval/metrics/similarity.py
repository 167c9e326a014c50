"""Text similarity through the benchmarks' own libraries, pinned where the result depends on it."""

from __future__ import annotations

import difflib
import importlib.util
import sys
import warnings
from functools import cache
from types import ModuleType
from typing import Any

_BACKEND = "fuzzywuzzy.StringMatcher"  # the python-Levenshtein wrapper
_ABSENT = object()


@cache
def _difflib_fuzz() -> ModuleType:
    """A private copy of `fuzzywuzzy.fuzz` on difflib, whatever else is installed.

    With python-Levenshtein present fuzzywuzzy silently computes another ratio: the same predictions
    score 70.92 instead of 69.58 on lcc. LongBench's requirements name fuzzywuzzy alone.
    """
    import fuzzywuzzy

    spec = importlib.util.find_spec("fuzzywuzzy.fuzz")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    saved = sys.modules.get(_BACKEND, _ABSENT)
    attribute = fuzzywuzzy.__dict__.pop("StringMatcher", _ABSENT)
    sys.modules[_BACKEND] = None  # type: ignore[assignment]  # importing it now fails
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Using slow pure-python SequenceMatcher"
            spec.loader.exec_module(module)
    finally:
        del sys.modules[_BACKEND]
        if saved is not _ABSENT:
            sys.modules[_BACKEND] = saved  # type: ignore[assignment]
        if attribute is not _ABSENT:
            fuzzywuzzy.StringMatcher = attribute
    if module.SequenceMatcher is not difflib.SequenceMatcher:
        raise RuntimeError(
            f"fuzzywuzzy uses {module.SequenceMatcher} instead of difflib.SequenceMatcher: code "
            "scores would not be comparable; install fuzzywuzzy==0.18.0"
        )
    return module


def edit_ratio(prediction: str, reference: str) -> float:
    """fuzzywuzzy's ratio on difflib, 0..1 in steps of 0.01."""
    return float(_difflib_fuzz().ratio(prediction, reference) / 100)


@cache
def _rouge() -> Any:
    from rouge import Rouge

    return Rouge(metrics=["rouge-l"])


def rouge_l_summary(prediction: str, reference: str) -> float:
    """F of summary-level ROUGE-L as the package `rouge` computes it (not Google's `rouge_score`).

    0 where that package raises, which it does for an empty or a punctuation-only text.
    """
    try:
        return float(_rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def words_zh(text: str) -> list[str]:
    """jieba's words of a Chinese text (accurate mode)."""
    return list(_jieba().cut(text, cut_all=False))


@cache
def _jieba() -> ModuleType:
    import logging

    import jieba

    jieba.setLogLevel(logging.WARNING)
    return jieba
