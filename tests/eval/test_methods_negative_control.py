"""Conformance 16: with the question decoded after the document, forgetting must show.

The real model, a secret number in the middle of text about something else, and less than a tenth of
the tokens. The measure is the negative log-likelihood of the number's digits, fed after the
question: knowing nothing costs ln 10 = 2.30 a digit or more. (Greedy matches would be too coarse: a
135M model finds the number densely and with the oracle's pages, but min/max bounds lose it in some
of the prompts.)
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from method_helpers import build, feed

from eval.methods import record
from eval.methods.proxies import filler
from flexicache_hf import HeadProfile

LENGTH, BUDGET, PROMPTS = 1200, 112, 3
FACT = "\nImportant: the secret number of the red vault in Lisbon is {0}. Do not forget the number {0} of the red vault in Lisbon.\n"  # noqa: E501
QUESTION = "\nQuestion: What is the secret number of the red vault in Lisbon?\nAnswer: The secret number of the red vault in Lisbon is {0}"  # noqa: E501

RETRIEVING = {
    "oracle": build("oracle", BUDGET),
    "quest": build("quest", BUDGET),
    "flexicache, all heads unstable": build("flexicache-mask", BUDGET, unstable="all"),
    "flexicache, the model's profile": build("flexicache-mask", BUDGET),
}
FORGETTING = {
    name: build(name, BUDGET)
    for name in ("streamingllm", "h2o", "tova", "snapkv", "random", "streaming-pages")
} | {
    # the paper's digest: with cuboid-mean digests even this one keeps a trace of the number
    "flexicache, no head unstable": build(
        "flexicache-mask", BUDGET, unstable="none", digest="minmax"
    )
}


def has_profile(model):
    return HeadProfile.for_model(model) is not None


@pytest.fixture(scope="module")
def costs(smollm2):
    """Mean cost of a digit in nats, by method."""
    model, tokenizer = smollm2

    def encode(string):
        return tokenizer(string, add_special_tokens=False, return_tensors="pt").input_ids

    methods = {"dense": build("dense", BUDGET)} | RETRIEVING | FORGETTING
    if not has_profile(model):
        del methods["flexicache, the model's profile"]
    rng, text = random.Random(1), filler(tokenizer)
    found = {name: [] for name in methods}
    for index in range(PROMPTS):
        number = "".join(rng.choices("0123456789", k=5))
        fact, tail = encode(FACT.format(number))[0], encode(QUESTION.format(number))
        start = rng.randrange(len(text) - LENGTH)
        hay = text[start : start + LENGTH - len(fact)]
        at = (index + 1) * len(hay) // (PROMPTS + 1)
        prompt, _ = record(model, torch.cat([hay[:at], fact, hay[at:]])[None])
        digits = tail[0, -5:]
        assert tokenizer.decode(digits) == number
        for name, method in methods.items():
            with method.session(model) as session:
                logits = feed(model, session.new_cache(prompt), tail)[0, -6:-1]
            found[name].append(-logits.log_softmax(-1).gather(1, digits[:, None]).mean())
    return {name: float(torch.stack(costs).mean()) for name, costs in found.items()}


@pytest.mark.model
def test_the_dense_model_and_the_oracle_know_the_number(costs):
    assert costs["dense"] < 0.3
    assert costs["oracle"] < 0.3


@pytest.mark.model
@pytest.mark.parametrize("name", list(RETRIEVING))
def test_retrieving_methods_know_it(costs, name):
    if name not in costs:
        pytest.skip("no head profile comes with this model")
    assert costs[name] < 0.7 * math.log(10)


@pytest.mark.model
@pytest.mark.parametrize("name", list(FORGETTING))
def test_methods_that_dropped_the_page_do_not(costs, name):
    assert costs[name] > math.log(10)
