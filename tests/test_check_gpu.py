"""`scripts/check_gpu.py`, tried on the CPU at tiny sizes: it has to be right the first time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
CPU = ["--device", "cpu", "--sizes", "tiny"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import check_gpu

    return check_gpu


def lines_of(text: str) -> dict[str, dict]:
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {line["check"]: line for line in found}


@pytest.mark.slow
def test_everything_runs_on_a_cpu(script, tmp_path):
    out = tmp_path / "found.jsonl"
    command = [sys.executable, str(SCRIPTS / "check_gpu.py"), *CPU, "--out", str(out)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(SCRIPTS.parent / "src"),
            "FLEXICACHE_HOME": str(
                tmp_path
            ),  # without the embedded model, as on a borrowed machine
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = lines_of(done.stdout)
    assert lines == lines_of(out.read_text())
    assert set(lines) == {name for name, _ in script.checks(script.Sizes.tiny())}
    assert all(line["ok"] for line in lines.values())
    assert lines["exact float32"]["plain"]["bitwise"]
    assert lines["exact bfloat16"]["padded"]["worst"] == 0
    sparse = lines["sparse steps against the CPU"]["paper"]
    assert sparse["rankings"] > 60 and sparse["cpu_would_choose_otherwise"] == 0
    assert lines["transfers float32"]["compared"] > 200
    assert lines["ranking cost"]["promoted"] > 0
    assert done.stdout.splitlines()[-1] == f"{len(lines)} passed, 0 failed"


def test_a_failing_check_does_not_stop_the_others(script, monkeypatch, capsys):
    def small_budget(model, config, **kwargs):
        return tiered(model, config.replace(token_budget=32), **kwargs)

    def broken(bench):
        raise RuntimeError("no such kernel")

    tiered = script.correct.tiered
    monkeypatch.setattr(script.correct, "tiered", small_budget)
    monkeypatch.setattr(script.measure, "overlap", broken)
    status = script.main([*CPU, "--only", "exact float32", "overlap", "versions"])
    lines = lines_of(capsys.readouterr().out)
    assert status == 1
    assert list(lines) == ["versions", "exact float32", "transfer overlap"]
    assert lines["versions"]["ok"]
    assert "logits differ" in lines["exact float32"]["error"]
    assert lines["exact float32"]["plain"]["worst"] > 1e-3
    assert "no such kernel" in lines["transfer overlap"]["error"]


def test_no_check_begins_after_the_limit(script, capsys):
    assert script.main([*CPU, "--only", "versions", "--limit", "0"]) == 1
    assert "not run" in lines_of(capsys.readouterr().out)["versions"]["error"]


def test_sizes_are_llama_3_1_8b(script):
    sizes = script.Sizes()
    bench = script.Bench("cpu", replace(sizes, layers=1))
    assert script.measure.dense_bytes(bench, 1) * sizes.layers == 131_072  # bytes per token
