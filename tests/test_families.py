"""Every supported decoder family: exact when covered, equal to the mask reference when sparse."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, build, tiered_heads
from helpers import decode, flexicache, forward, left_padding, random_ids
from transformers import DynamicCache

from flexicache_hf.layer import FlexiCacheLayer

# grouped matrix products know no float64
SINGLE = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next")
EAGER = ("gemma2",)  # transformers' eager softmax computes in float32 whatever comes in


def choose(model, kind: str):
    heads = tiered_heads(model)
    return {"stable": [], "unstable": heads, "mixed": heads[::2]}[kind]


@pytest.mark.parametrize("family", FAMILIES)
def test_covered_equals_dense(family):
    model, ids, mask = build(family), random_ids(3, 50), left_padding(50, 0, 17, 40)
    if family == "gpt2":  # learned positions come from the mask inside the model
        mask = None
    cache = flexicache(model, *choose(model, "mixed"), token_budget=256)
    expected = decode(model, DynamicCache(config=model.config), ids, 40, mask)
    assert torch.equal(decode(model, cache, ids, 40, mask), expected)
    tiered = {layer.index for layer in cache.layers if isinstance(layer, FlexiCacheLayer)}
    assert tiered == {layer for layer, _ in tiered_heads(model)}


@pytest.mark.parametrize("kind", ["stable", "unstable", "mixed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sparse_equals_a_dense_cache_under_its_mask(family, kind):
    """What was attended is read from the cache itself; the model then gets it as a mask."""
    model = build(family, torch.float32 if family in SINGLE else torch.float64)
    tolerance = 2e-4 if family in SINGLE else 1e-5 if family in EAGER else 1e-9
    ids, tokens = random_ids(2, 90), random_ids(2, 24, seed=3)
    cache = flexicache(model, *choose(model, kind), token_budget=32, page_size=8, rerank_interval=4)
    with MaskedDense(model, cache) as dense:
        for step in range(25):
            fed = ids if step == 0 else tokens[:, step - 1 : step]
            found = forward(model, cache, fed)
            expected = dense.forward(fed)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert dense.masked > 0
    if family in ("gemma3n", "gemma4"):  # layer 5 reads the keys and values of layer 3
        assert dense.readers == {1, 3, 5}


class MaskedDense:
    """Feeds the same tokens to a dense cache whose attention sees only what `cache` attended."""

    def __init__(self, model, cache) -> None:
        self.model, self.cache = model, cache
        self.dense = DynamicCache(config=model.config)
        self.masked = 0
        self.attended = {}
        self.readers = set()

    def __enter__(self):
        for layer in self.cache.layers:
            if isinstance(layer, FlexiCacheLayer):
                self._watch(layer)
        self.hooks = [
            module.register_forward_pre_hook(self._mask, with_kwargs=True)
            for name, module in self.model.named_modules()
            if name.endswith(("self_attn", ".attn"))
        ]
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def _watch(self, layer) -> None:
        """Remember the pages of each decode step, before a ranking changes them."""
        original, attend = layer._sparse, layer.attend
        reader = []

        def attended(module, *args, **kwargs):
            reader[:] = [module.layer_idx]  # maybe a layer that shares this one's keys
            return attend(module, *args, **kwargs)

        def sparse(queries, step, scaling, *args):
            groups = layer.groups
            heads = sum(map(len, groups))
            length = step.lengths[0]
            mask = torch.zeros(len(queries), heads, length, dtype=torch.bool)
            for group, store in zip(groups, (layer.stable, layer.unstable)):
                if store is None:
                    continue
                if store is layer.unstable:
                    part = group.of_batch(queries).flatten(2, 3)
                    pages = store.select(part, step, scaling)
                else:
                    pages = store.working_set.pages
                size = store.config.page_size
                for row, head, page in pages.unsqueeze(-1).flatten(2).nonzero().tolist():
                    number = int(pages[row, head, page])
                    if number >= 0:
                        mask[row, group.heads[head], number * size : (number + 1) * size] = True
                for row in range(len(pages)):
                    for head in range(len(group)):
                        if (pages[row, head] == 0).any():
                            mask[row, group.heads[head], :size] = True
            self.attended[reader[0]] = mask
            return original(queries, step, scaling, *args)

        layer._sparse, layer.attend = sparse, attended

    def _mask(self, module, args, kwargs):
        pages = self.attended.get(module.layer_idx)
        fed_dense = kwargs.get("cache", kwargs.get("past_key_values")) is self.dense
        if not fed_dense or pages is None:
            return None
        self.masked += 1
        self.readers.add(module.layer_idx)
        group = (
            self.model.config.get_text_config(decoder=True).num_attention_heads // pages.shape[1]
        )
        hidden = ~pages.repeat_interleave(group, 1)[:, :, None]
        dtype = self.model.dtype
        kwargs["attention_mask"] = torch.zeros(hidden.shape, dtype=dtype).masked_fill(
            hidden, torch.finfo(dtype).min
        )
        return args, kwargs

    def forward(self, ids):
        out = forward(self.model, self.dense, ids)
        self.attended.clear()
        return out
