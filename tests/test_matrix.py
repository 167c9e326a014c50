"""Every decoder family in every mode, on tiny random models.

Covered (a budget that covers the text): what DynamicCache gives, bit for bit. Otherwise: every
forward's logits are those of a dense cache under the mask of what was attended (mirror.py).
"""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
import torch
from families import FAMILIES, build, tiered_heads
from helpers import profile_of
from mirror import DenseTwin, Mirrored, MirroredCache
from modes import COVERED, MODES, SPARSE

from flexicache_hf.integration.layer import FlexiCacheLayer

KINDS = {
    "covered": (2, COVERED),
    "sparse": (2, SPARSE),
    "all stable": (0, SPARSE),
    "all unstable": (1, SPARSE),
}
"""Every how many heads are unstable (0: none), and the sizes."""

# grouped matrix products know no float64, and eager attention's float32 softmax no float64 mask
SINGLE = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "gemma2")


@lru_cache(maxsize=8)
def dense(family: str, mode: str) -> list[torch.Tensor] | Exception:
    """What DynamicCache gives, or why transformers cannot do it."""
    model = copy.deepcopy(build(family))
    try:
        return MODES[mode](model, DenseTwin(model.config))
    except (ValueError, RuntimeError, AttributeError) as error:
        return error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_in_mode(family, mode, kind):
    expected = dense(family, mode)
    single = family in SINGLE or kind == "covered"
    model = copy.deepcopy(build(family, torch.float32 if single else torch.float64))
    every, sizes = KINDS[kind]
    heads = tiered_heads(model)[::every] if every else []
    if isinstance(expected, Exception):
        layers = DenseTwin(model.config).layers
        assert len({head[0] for head in tiered_heads(model)}) < len(layers), expected
        pytest.skip(f"transformers' DynamicCache cannot: {expected}")
    cache = MirroredCache(model, profile_of(model, *heads), **sizes)
    if (family, mode) == ("qwen3_next", "crop"):
        with pytest.raises(RuntimeError, match="recurrent state, which knows no past"):
            MODES[mode](model, cache)
        return  # transformers goes on, with the state of the text before the crop
    tolerance = 0.0 if kind == "covered" else 2e-4 if single else 1e-9
    with Mirrored(model, tolerance) as mirror:
        found = MODES[mode](model, cache)
    tiered = {layer.index for layer in cache.layers if isinstance(layer, FlexiCacheLayer)}
    assert tiered == {layer for layer, _ in tiered_heads(model)}
    if kind == "covered":
        assert not mirror.sparse
        assert len(found) == len(expected)
        exact = (family, mode) != ("gemma4", "last logits")  # computes fewer of them, see docs
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other, rtol=0, atol=0 if exact else 1e-5)
    else:
        assert mirror.sparse >= 2
        # in gemma3n and gemma4 the last layer reads the keys and values of another
        assert mirror.most == len(tiered) + (family in ("gemma3n", "gemma4"))
