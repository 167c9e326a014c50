"""Text to hide needles in, words for keys, and fitting a generated prompt to a length in tokens."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from eval.tasks.base import Prompt, Request

# Wording ours; like the benchmark's, five short sentences that say nothing.
NOISE = "The lake is calm. The road is long. The lamp is lit. On we walk. Here we are, as before."

_ADJECTIVES = """
amber ancient autumn bitter blue bold brave brief bright broad calm clear clever cold cosmic
crimson curious daring deep distant eager early empty faint famous fearless gentle giant golden
grand green happy hidden hollow humble icy idle jolly keen kind large lively lone loud lucky
mellow mild misty modest narrow noble odd open pale patient plain proud quick quiet rapid rare red
rough royal rustic sandy secret serene shy silent silver simple slow small smooth solar solid
spare steady still stormy sunny sweet swift tall tame tidy tiny upper urban vast velvet vivid warm
wary wild windy wise
"""
_NOUNS = """
acorn anchor apple arrow aspen badger banner barley basin basket beacon beaver bell birch bishop
boat bottle branch bridge brook bucket cabin camel candle canyon carpet castle cedar chapel cherry
circle cliff cloud clover coast comet copper coral cotton cradle crane crater creek cricket crown
crystal curtain daisy dragon drum eagle ember engine falcon feather fern ferry fiddle field finch
flame flute forest fountain fox garden garnet glacier goose granite grove hammer harbor harp hazel
heron hill honey horizon island ivory jacket jasmine jewel kettle kite ladder lantern lark lemon
lily linen lion lizard lotus magnet maple marble meadow melon mirror moon moss mountain needle oak
ocean olive orchard otter owl paddle palace panther paper parrot pebble pepper pine planet plum
pocket pond poplar prairie puzzle quarry rabbit raven ribbon river robin rocket saddle saffron
sail salmon shadow shell shepherd signal sparrow spruce squirrel statue stone summit swallow
temple thistle thunder tiger timber torch tower trumpet tulip turtle valley violet violin walnut
whale wheat willow window winter wolf zebra
"""


@dataclass(frozen=True)
class Sample:
    """A generated prompt with its references."""

    prompt: Prompt
    references: list[str]


# Same arguments, same sample; more units, a longer prompt.
Builder = Callable[[random.Random, int], Sample]


@cache
def word_pairs() -> tuple[str, ...]:
    """Every adjective-noun word, e.g. `amber-acorn`; RULER takes its words from `wonderwords`."""
    return tuple(f"{a}-{n}" for a in _ADJECTIVES.split() for n in _NOUNS.split())


def words(rng: random.Random, count: int) -> list[str]:
    """Different words.

    Raises:
        ValueError: there are not that many.
    """
    if count > len(word_pairs()):
        raise ValueError(f"{count} different words wanted, but there are {len(word_pairs())}")
    return rng.sample(word_pairs(), count)


@cache
def prose(source: str | None) -> tuple[str, ...]:
    """Sentences of real text: `essays.txt` in `source`, else the language reference that every
    Python ships (the essays RULER uses are under copyright)."""
    path = Path(source or "") / "essays.txt"
    if source and path.is_file():
        text = path.read_text(encoding="utf-8")
    else:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics))
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    sentences = (s for p in paragraphs for s in re.split(r"(?<=[.!?])\s+", p))
    return tuple(s for s in sentences if re.search(r"\w{3}", s) and len(s) < 600)


def insert_at(lines: list[str], needles: list[str], depths: list[float]) -> list[str]:
    """`lines` with each needle put at its depth, 0 (before all) to 1 (after all)."""
    places = sorted(zip((round(depth * len(lines)) for depth in depths), needles), reverse=True)
    lines = list(lines)
    for place, needle in places:
        lines.insert(place, needle)
    return lines


def fit(build: Builder, request: Request, new_tokens: int, index: int, start: int = 0) -> Sample:
    """The longest sample `index` whose prompt and answer fit `request.context` tokens.

    Found by bisection over the units. Equal requests give equal samples.

    Raises:
        ValueError: not even the shortest fits.
    """
    from eval.encode import encode

    def make(units: int) -> Sample:
        return build(random.Random(f"{request.seed}-{index}"), units)

    def fits(units: int) -> bool:
        ids = encode(make(units).prompt, request.tokenizer).ids
        return len(ids) + new_tokens <= request.context

    low, high = start, start + 1
    if not fits(low):
        raise ValueError(f"no prompt fits a context of {request.context} tokens")
    try:
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
    except ValueError:  # the words ran out; what fitted last is as long as it gets
        pass
    return make(low)
