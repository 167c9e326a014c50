"""scripts/check_profile.py: its masks and the cache itself are the same method."""

import importlib
from pathlib import Path

import pytest
import torch
from helpers import tiny_llama

from flexicache_hf import FlexiCacheConfig, FlexiCacheDynamicCache, HeadProfile

SCRIPTS = Path(__file__).parents[1] / "scripts"
SETS = ((), ((0, 1),), ((0, 0), (1, 1)), ((0, 0), (0, 1), (1, 0), (1, 1)))


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("page_masks"), importlib.import_module("check_profile")


@pytest.mark.parametrize("tokens", [176, 183])  # whole pages, and a tail
def test_masks_and_cache_agree(scripts, tokens):
    masks, check = scripts
    model, steps = tiny_llama(), 40
    prompt = torch.randint(1, 97, (1, tokens), generator=torch.Generator().manual_seed(2))
    cases = [(heads, pages) for heads in SETS for pages in (2, 5)]
    variants = [masks.Variant(frozenset(heads), pages) for heads, pages in cases]
    found = masks.compare_variants(model, prompt, [masks.Variant(), *variants], steps)
    assert found[0] == (0.0, 1.0)  # the dense variant is dense
    fed, dense = check.dense_run(model, prompt, steps)
    for (heads, pages), (kl, top1) in zip(cases, found[1:], strict=True):
        cache = FlexiCacheDynamicCache(
            model,
            HeadProfile.from_unstable_heads(model.config, heads),
            config=FlexiCacheConfig.paper(token_budget=16 * pages),
        )
        expected = check.compare(model, cache, prompt, fed, dense)
        assert kl == pytest.approx(expected[0], rel=1e-4, abs=1e-6)
        assert top1 == pytest.approx(expected[1])
        assert kl > 1e-3  # something was left out
    assert len({round(kl, 6) for kl, _ in found}) == len(found)  # every variant differs


def test_report_pairs_documents(scripts, tmp_path):
    _, check = scripts
    path = tmp_path / "rows.jsonl"
    kl = {"profile": 0.1, "random.0": 0.2, "random.1": 0.4, "most_stable": 0.5, "none": 0.6}
    for number in range(3):
        row = {"document": f"d/{number}", "budget": 128, "through": "masks"}
        rows = [{**row, "set": name} for name in kl]
        check.save(path, rows, [(value + number, 0.5) for value in kl.values()])
    check.save(path, [{**row, "set": "none", "through": "cache"}], [(2.61, 0.5)])
    text = check.report(path)
    assert "| 128 | 3 | 1.1000 (0.500) | 1.3000 (0.500) | 1.5000 (0.500) |" in text
    assert "+0.2000 [+0.2000, +0.2000] | +0.4000 [+0.4000, +0.4000]" in text
    assert "1 measurements, KL differs by at most 0.01." in text
