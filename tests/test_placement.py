"""Where a model may live: several processes, accelerate's hooks, weights that are not floats."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensor_parallel
import torch
from helpers import tiny_llama

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
        torch.testing.assert_close(found["sparse"], one["sparse"], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(found["sparse"], found["dense"], rtol=1e-2, atol=1e-2)


def test_tensor_parallel_given_the_configuration_alone_is_refused(ranks):
    for found in ranks[1]:
        assert "layer 0 has 2 KV heads in this process, and 4" in found["configuration alone"]
        assert "FlexiCacheDynamicCache(model, ...)" in found["configuration alone"]
        assert found["cached after the refusal"] == 0


def test_tensor_parallel_host_limit_counts_the_heads_of_this_process(ranks):
    stable = [found["host limit"].split(" stable heads")[0].split()[-1] for found in ranks[1]]
    assert stable == ["4", "3"]
