"""RULER's tracing and aggregation tasks: variable chains, common words, frequent words."""

from __future__ import annotations

import random
import string
from itertools import pairwise

from eval.tasks.base import Prompt
from eval.tasks.haystack import NOISE, Sample, words

COMMON, COMMON_TIMES, OTHER_TIMES = 10, 30, 3
HOPS = 4
CODED_LENGTH, ALPHA = 6, 2.0


def _chain(rng: random.Random, lines: int) -> tuple[str, str, list[str]]:
    """Noise with one chain of assignments in order; the first value and the variables."""
    names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(HOPS + 1)]
    value = str(rng.randint(10_000, 99_999))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old}" for old, new in pairwise(names)]
    places = sorted(rng.random() for _ in chain)
    return "\n".join(insert_in_order([NOISE] * lines, chain, places)), value, names


def insert_in_order(lines: list[str], needles: list[str], depths: list[float]) -> list[str]:
    """Each needle at its depth, in their given order; `depths` ascend."""
    places = [round(depth * len(lines)) for depth in depths]
    result: list[str] = []
    for index in range(len(lines) + 1):
        result += [needle for place, needle in zip(places, needles) if place == index]
        result += lines[index : index + 1]
    return result


def _vt_question(value: str) -> str:
    return (
        f"\nWhich variables hold the value {value}, directly or through others? Name all of them."
    )


def vt(rng: random.Random, units: int) -> Sample:
    """Variable tracking: a chain of `HOPS` hops; one worked example first."""
    shown, shown_value, shown_names = _chain(rng, 5)
    text, value, names = _chain(rng, units)
    task = "Keep track of the variables in the text below.\n"
    answer = f"They are: {' '.join(shown_names)}"
    lead = f"{task}{shown}{_vt_question(shown_value)}\n{answer}\n\n{task}"
    return Sample(Prompt(text, _vt_question(value), lead, cue="They are:"), names)


def _word_list(rng: random.Random, others: int, times: tuple[int, int]) -> tuple[str, list[str]]:
    chosen = words(rng, COMMON + others)
    common = chosen[:COMMON]
    listed = common * times[0] + chosen[COMMON:] * times[1]
    rng.shuffle(listed)
    return " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1)), common


def cwe(rng: random.Random, units: int) -> Sample:
    """Common words: ten words occur 30 times, `units` others 3 times; one example first."""
    question = "\nWhich ten words occur most often in the list above?"
    shown, shown_common = _word_list(rng, 20, (3, 1))
    text, common = _word_list(rng, units, (COMMON_TIMES, OTHER_TIMES))
    task = "Below is a numbered list of words. Some occur more often than others; remember them.\n"
    answer = " ".join(f"{number}. {word}" for number, word in enumerate(shown_common, 1))
    cue = "The words are:"
    lead = f"{task}{shown}{question}\n{cue} {answer}\n\n{task}"
    return Sample(Prompt(text, question, lead, cue=cue), common)


def fwe(rng: random.Random, units: int) -> Sample:
    """Frequent words: coded words with counts falling as rank ** -2; rank 1 is the noise `...`.

    The three that follow it are asked for. `units` is the number of words in units of 50.
    """
    total = 50 * (units + 1)
    scale = total / sum(rank**-ALPHA for rank in range(1, 51))
    coded: list[str] = []
    while len(coded) < 49:
        word = "".join(rng.choices(string.ascii_lowercase, k=CODED_LENGTH))
        if word not in coded:
            coded.append(word)
    ranked = ["...", *coded]
    listed = [w for rank, w in enumerate(ranked, 1) for _ in range(round(scale * rank**-ALPHA))]
    rng.shuffle(listed)
    lead = "Below is a coded text. Find out which words are the most frequent, without '...'.\n"
    question = "\nName the three most frequent words of the coded text above."
    cue = "The three most frequent words are:"
    return Sample(Prompt(" ".join(listed), question, lead, cue=cue), coded[:3])
