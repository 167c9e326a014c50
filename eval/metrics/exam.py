"""L-Eval's closed-ended tasks: extract an answer from the prediction, then match it exactly.

What looks odd below is the benchmark's own behaviour; published scores include it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from eval.metrics.text import normalise

LETTERS = "ABCD"
_OPTION = re.compile(r"[A-Z](?=[\s.)])")
_BOXED = re.compile(r"The answer is (\S+)")
_CODE_FILLERS = (
    "will be",
    "of the code",
    "is",
    "would be",
    "the value of",
    "the result of",
    "printed",
)


def one_choice(prediction: str) -> str:
    """The first of the letters A-D; `A` (the benchmark's guess) if there is none."""
    if prediction in LETTERS:  # the empty text too, and it stays empty
        return prediction
    return next((char for char in prediction if char in LETTERS), "A")


def many_choices(prediction: str) -> str:
    """The sorted set of chosen letters; `A` if there is none.

    Two or more letters at the very start are the answer. Otherwise a letter counts when a space,
    a full stop or a closing bracket follows, up to the word "Question" (the next one, run on).
    """
    if prediction in LETTERS:
        return prediction
    rest = prediction.lstrip(LETTERS)
    leading = prediction[: len(prediction) - len(rest)]
    if len(leading) > 1:
        return "".join(sorted(set(leading)))
    options = _OPTION.findall(rest.split("Question")[0])
    return "".join(sorted({*leading, *options} & set(LETTERS))) or "A"


def choice_reference(reference: str) -> str:
    """Letters A-D of the first word."""
    return "".join(char for char in reference.split()[0] if char in LETTERS) or "A"


def number(text: str) -> str:
    """Digits before a decimal point of the word after "The answer is".

    Without that phrase, of the last word with a digit in the first paragraph.
    """
    if match := _BOXED.search(text):
        word = match[1]
    else:
        words = text.split("\n\n")[0].split(" ")
        word = next((w for w in reversed(words) if any(c.isdigit() for c in w)), "")
    return "".join(char for char in word.split(".")[0] if char.isdigit())


def code_output(text: str) -> str:
    """Printed program output, without the differences that carry no meaning."""
    text = re.sub(r"\s+", " ", text)
    for old, new in ((",", ""), ("'", ""), ("\\", ""), (".0", "")):
        text = text.replace(old, new)
    for old, new in (("] [", "]["), ("[ [", "[["), ("] ]", "]]")):
        text = text.replace(old, new)
    return text


def _code_prediction(prediction: str, reference: str) -> str:
    """As many words as the reference has and three more: after "the final output", or the last."""
    text = code_output(prediction)
    for filler in _CODE_FILLERS:
        text = text.replace(filler, "")
    count = len(reference.split()) + 3
    _, found, tail = text.rpartition("the final output")
    words = re.split(r"\s+", tail)[:count] if found else re.split(r"\s+", tail)[-count:]
    return " ".join(words)


def match(prediction: str, reference: str) -> float:
    """Exact match of extracted answers.

    Letters: 1 if the sets are equal, 0.25 if nothing wrong but something missing is chosen.
    Otherwise equality as numbers where both are numbers, else the reference inside the first line
    of more than one character, ignoring case and spaces.
    """
    expected, found = normalise(reference, lower=False), normalise(prediction, lower=False)
    if all(char in LETTERS for char in expected):
        if found == expected:
            return 1.0
        return 0.25 if set(found) <= set(expected) else 0.0
    try:
        return float(float(prediction) == float(reference))
    except ValueError:
        line = next((line for line in prediction.split("\n") if len(line) > 1), prediction)
        return float(_squeeze(reference) in _squeeze(line))


def _squeeze(text: str) -> str:
    return text.lower().replace(" ", "")


def _judgements(text: str) -> list[str]:
    """Loyalty and fact of "true [fact: false]", in lower case; a missing part is empty."""
    parts = text.lower().split("[fact:")
    return [parts[0].strip(), parts[1][:-1].strip() if len(parts) > 1 else ""]


def _verdict(text: str) -> str:
    """`true` or `false`, whichever the first word with either in it says."""
    for word in text.split():
        for verdict in ("true", "false"):
            if verdict in word:
                return verdict
    return "<error>"


def one_choice_exam(prediction: str, reference: str) -> float:
    return match(one_choice(prediction), choice_reference(reference))


def many_choices_exam(prediction: str, reference: str) -> float:
    return match(many_choices(prediction), choice_reference(reference))


def number_exam(prediction: str, reference: str) -> float:
    return match(number(prediction), number(reference))


def code_exam(prediction: str, reference: str) -> float:
    return match(_code_prediction(prediction, reference), code_output(reference))


def judgement_exam(prediction: str, reference: str) -> float:
    """Mean of loyalty (what the document says) and fact (what is true)."""
    pairs = zip(_judgements(prediction), _judgements(reference))
    return sum(match(_verdict(found), expected) for found, expected in pairs) / 2


EXAMS: Mapping[str, Callable[[str, str], float]] = {
    "coursera": many_choices_exam,
    "gsm100": number_exam,
    "quality": one_choice_exam,
    "topic_retrieval_longchat": match,
    "tpo": one_choice_exam,
    "codeU": code_exam,
    "sci_fi": judgement_exam,
}
