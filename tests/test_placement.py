"""Where a model may live: several processes, accelerate's hooks, weights that are not floats."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import tensor_parallel
import torch
from helpers import cache_argument, decode, flexicache, forward, random_ids, tiny_llama
from transformers import AutoModelForCausalLM, DynamicCache, QuantoConfig

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """`(one process, [rank 0, rank 1])`: results of the same model."""
    model = copy.deepcopy(tiny_llama(layers=3, kv_heads=4))
    model.resize_token_embeddings(98, mean_resizing=False)  # transformers 5.17 halves it
    saved, out = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("ranks")
    model.save_pretrained(saved)
    paths = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*command, str(HERE / "tensor_parallel.py"), str(saved), str(out)],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-12000:]
    parts = [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(2)]
    return tensor_parallel.results(model), parts


def test_tensor_parallel_covered_equals_dense(ranks):
    for found in ranks[1]:
        assert torch.equal(found["covered"], found["dense"])


def test_tensor_parallel_ranks_take_their_heads_of_the_profile(ranks):
    one, (first, second) = ranks
    assert one["unstable"] == [[0], [1, 3], [2, 3]]
    assert (first["unstable"], second["unstable"]) == ([[0], [1], []], [[], [1], [0, 1]])
    assert first["promoted"] + second["promoted"] == one["promoted"] > 0


def test_tensor_parallel_sparse_equals_one_process(ranks):
    one, parts = ranks
    for found in parts:
        torch.testing.assert_close(found["dense"], one["dense"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["sparse"], one["sparse"], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(found["sparse"], found["dense"], rtol=1e-2, atol=1e-2)


def test_tensor_parallel_given_the_configuration_alone_is_refused(ranks):
    for found in ranks[1]:
        assert "layer 0 has 2 KV heads in this process, and 4" in found["configuration alone"]
        assert "FlexiCacheDynamicCache(model, ...)" in found["configuration alone"]
        assert found["cached after the refusal"] == 0


def test_tensor_parallel_does_not_learn_from_a_share_of_the_heads(ranks):
    for found in ranks[1]:
        assert "profile is 'auto', but this process holds only 2 of 4 KV heads" in found["auto"]


def test_tensor_parallel_host_limit_counts_the_heads_of_this_process(ranks):
    stable = [found["host limit"].split(" stable heads")[0].split()[-1] for found in ranks[1]]
    assert stable == ["4", "3"]


def both(model, pairs=((0, 0), (1, 1)), **sizes):
    """Logits with our cache and with transformers' own, the same tokens fed."""
    ids, tokens = random_ids(2, 60), random_ids(2, 20, seed=5)
    cache = flexicache(model, *pairs, **sizes)
    dense = DynamicCache(config=model.config)
    return tuple(decode(model, each, ids, 20, None, tokens) for each in (cache, dense))


def test_accelerate_hooks():
    """dispatch_model's hooks move arguments between devices; they must leave the cache alone."""
    model = copy.deepcopy(tiny_llama())
    plain, _ = both(tiny_llama(), token_budget=32, page_size=4)
    places = {name: "cpu" for name, _ in model.named_modules() if name.count(".") == 2}
    places |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    model = accelerate.dispatch_model(model, places | {"lm_head": "cpu"}, force_hooks=True)
    assert hasattr(model.model.layers[1], "_hf_hook")
    assert torch.equal(both(model, token_budget=32, page_size=4)[0], plain)
    covered, dense = both(model, token_budget=256)
    assert torch.equal(covered, dense)
    kwargs = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    kwargs[cache_argument(model)] = flexicache(model, (0, 0), token_budget=32)
    assert model.generate(random_ids(1, 60), **kwargs).shape == (1, 68)


def test_accelerate_cpu_offload_of_weights():
    """Weights travel to the device for each layer's turn; the cache does not."""
    model = copy.deepcopy(tiny_llama())
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    covered, dense = both(model, token_budget=256)
    assert torch.equal(covered, dense)


def test_device_map_from_pretrained(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}).eval()
    covered, dense = both(model, token_budget=256)
    assert torch.equal(covered, dense)


def test_layers_on_one_device_share_a_queue():
    """And each device has one of its own."""
    model = tiny_llama(layers=3)
    cache = flexicache(model, token_budget=32)
    forward(model, cache, random_ids(1, 60))
    queue = cache._shared.make_queue(torch.device("cpu"))
    assert all(layer.stable.queue is queue for layer in cache.layers)
    other = cache._shared.make_queue(torch.device("meta"))
    assert other is not queue
    assert cache._shared.make_queue(torch.device("meta")) is other


def test_quantised_weights(tmp_path):
    """int8 weights; keys and values stay floats."""
    quanto = pytest.importorskip("optimum.quanto")
    tiny_llama().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=QuantoConfig(weights="int8")
    ).eval()
    assert isinstance(model.model.layers[0].self_attn.k_proj, quanto.nn.QLinear)
    covered, dense = both(model, token_budget=256)
    assert torch.equal(covered, dense)
    found, unquantised = (both(m, token_budget=32, page_size=4)[0] for m in (model, tiny_llama()))
    assert not torch.equal(found, unquantised)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype):
    model = tiny_llama(dtype=dtype)
    covered, dense = both(model, token_budget=256)
    assert covered.dtype == dtype
    assert torch.equal(covered, dense)
    found, expected = (both(m, token_budget=32)[0] for m in (model, tiny_llama()))
    tolerance = 1e-4 if dtype == torch.float32 else 0.5  # of logits up to 14; a page may differ
    assert (found.float() - expected).abs().mean() < tolerance
