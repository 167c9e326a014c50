"""scripts/results.py and scripts/compare_fidelity.py, on a small run with a tiny model."""

from __future__ import annotations

import csv
import importlib
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eval.cli import main
from eval.dry import write_rows
from eval.settings import Settings
from eval.stand_in import tiny_model
from flexicache_hf import HeadProfile

ROOT = Path(__file__).resolve().parents[2]
README = "# Results\n\nBy hand.\n\n" + "".join(
    f"## {name}\n<!-- begin {name} -->\nstale\n<!-- end {name} -->\nMore by hand.\n"
    for name in ("settings", "targets", "methods", "longtasks", "long", "ablations", "answers")
)
TASKS = ("patent_summ", "gov_report", "qasper")


@pytest.fixture(scope="module", autouse=True)
def scripts():
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    """Of a run on a stand-in that has random gates and one unstable head."""
    from results import Sizes

    folder = tmp_path_factory.mktemp("inputs")
    np.savetxt(folder / "gates.tsv", np.random.default_rng(0).random((3, 2)), delimiter="\t")
    listed = HeadProfile.from_unstable_heads(tiny_model("llama").config, [(1, 0)])
    stability = ((0.9, 0.8), (0.1, 0.7), (0.6, 0.5))
    replace(listed, stability=stability).save_pretrained(folder / "profile")
    write_rows("leval", TASKS[:1], folder / "leval", rows=4)
    write_rows("longbench", TASKS[1:], folder / "longbench", rows=2)
    return Sizes(
        model="stand-in:llama",
        data=str(folder / "{suite}"),
        gates=str(folder / "gates.tsv"),
        profile=str(folder / "profile"),
        documents=2,
        steps=18,
        long_steps=20,
        answered=2,
        budgets="256,512",
    )


@pytest.fixture(scope="module")
def results(sizes, tmp_path_factory):
    """What the jobs of three tasks wrote."""
    from results import jobs, share_dense

    out = tmp_path_factory.mktemp("results")
    share_dense(out)
    for job in jobs(sizes):
        skipped = (("main", "qasper"), ("long", "gov_report"))
        if job.task in TASKS and (job.part, job.task) not in skipped:
            assert main([*job.command(out, sizes)[3:], "--max-new-tokens", "8"]) == 0
    return out


@pytest.fixture(scope="module")
def written(results, tmp_path_factory):
    from results_report import write

    out = tmp_path_factory.mktemp("docs")
    (out / "README.md").write_text(README)
    write(results, out)
    return out


def table(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def rows_of(results, part, group, task, method):
    path = results / part / group / task / f"{method}.fidelity.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line.get("kind") != "header"]


def test_the_jobs_cover_what_docs_promise():
    from results import ABLATIONS, Sizes, jobs

    every = jobs(Sizes())
    main_jobs = [job for job in every if job.part == "main"]
    for suite in ("leval", "longbench"):
        assert len({job.task for job in main_jobs if job.suite == suite}) >= 6
    for job in main_jobs:
        assert job.options[-1] == "256,512,1024"
        assert {"oracle", "quest", "quest(last_page=ranked)", "infinigen"} <= set(job.methods)
    for job in every:  # every option is one that the methods take
        settings = Settings("m", job.suite, (job.task,), job.methods, (512,), "out")
        assert len(settings.build_methods(job.task)) == len(job.methods)
    assert {"patent_summ", "gov_report"} <= {job.task for job in every if job.part == "long"}
    assert all(spec.endswith("@512") for spec in ABLATIONS)


def test_the_command_lists_its_jobs():
    command = [sys.executable, str(ROOT / "scripts" / "results.py"), "list", "--steps", "64"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    lines = shown.splitlines()
    assert sum("--fidelity-steps 64 " in line for line in lines) == 18
    assert all(line.startswith("python -m eval run ") for line in lines)


def test_marked_places_are_filled_and_the_rest_is_kept(written, sizes):
    text = (written / "README.md").read_text()
    assert "stale" not in text
    assert text.startswith("# Results\n\nBy hand.")
    assert text.count("More by hand.") == 7
    assert "stand-in:llama, float32" in text
    assert "package defaults of this run: `page_size=16, " in text
    assert "paper preset of this run: `page_size=16, rerank_interval=16, digest=minmax" in text
    assert "| top-1 over the oracle's >= 0.97 | 256 | 4 |" in text
    for name in ("Quest", "Quest (last page ranked)"):
        assert f"| top-1 less {name}'s >= -0.01 | 512 |" in text
    for name in ("main/report.md", "main/scores.csv", "long/report.md", "answers/report.md"):
        assert (written / name).stat().st_size > 500
    assert (written / "ablations.png").read_bytes().startswith(b"\x89PNG")
    assert "InfLLM (scaled)" in text
    assert "| FlexiCache | 512 | 2 |" in text  # generated answers, through the real cache


def test_a_second_report_changes_nothing(results, written):
    from results_report import write

    before = (written / "README.md").read_text()
    write(results, written)
    assert (written / "README.md").read_text() == before


def test_a_later_run_of_one_part_fills_only_that(results, written, tmp_path):
    from results_report import write

    some, out = tmp_path / "results", tmp_path / "docs"
    shutil.copytree(results / "long", some / "long")
    out.mkdir()
    (out / "README.md").write_text(README)
    write(some, out)
    text, whole = (out / "README.md").read_text(), (written / "README.md").read_text()
    place = re.compile("<!-- begin (\\w+) -->\n(.*?)<!-- end ", re.DOTALL)
    found, expected, empty = (dict(place.findall(each)) for each in (text, whole, README))
    assert found == empty | {"long": expected["long"]}
    with pytest.raises(FileNotFoundError, match="no results in"):
        write(tmp_path / "nothing", out)


def test_verdicts_are_the_means_of_the_rows(results, written):
    found = {(row["target"], row["budget"]): row for row in table(written / "targets.csv")}
    places = (("leval-A", "patent_summ"), ("longbench-A", "gov_report"))

    def mean(method, name):
        return np.mean([r[name] for p in places for r in rows_of(results, "main", *p, method)])

    ours = "flexicache-mask@256"
    ratio = mean(ours, "top1") / mean("oracle@256", "top1")
    row = found["top-1 over the oracle's >= 0.97", "256"]
    assert float(row["value"]) == pytest.approx(ratio)
    assert row["holds"].startswith("yes" if ratio >= 0.97 else "no")
    assert float(row["value low"]) <= ratio <= float(row["value high"])
    row = found["long answers: KL less SnapKV's < 0", "512"]
    difference = mean("flexicache-mask@512", "kl") - mean("snapkv@512", "kl")
    assert float(row["value"]) == pytest.approx(difference)
    assert row["holds"].startswith("yes" if difference < 0 else "no")


def test_a_method_is_compared_on_shared_rows(results):
    compare = importlib.import_module("compare_fidelity")
    every = compare.load([results / "main"])
    rows = compare.targets(every, compare.MASK_FORM, ["patent_summ"])
    assert {row["documents"] for row in rows} == {2}
    own = [row for row in rows if row["method"] == compare.MASK_FORM]
    assert [row["budget"] for row in own] == [256, 512]
    assert all(row["KL difference"].value == 0 and row["top-1 ratio"].value == 1 for row in own)
    assert all(row["budget"] in (256, 512) for row in rows)
    # Without a budget of their own: beside every budget.
    free = [row["budget"] for row in rows if row["method"] == "DuoAttention"]
    assert free == [256, 512]
    assert "nothing to compare" in compare.show(compare.targets(every, "no such label", None))


def test_ablations_are_ratios_to_the_paper_preset(results):
    compare = importlib.import_module("compare_fidelity")
    every = compare.load([results / "main", results / "ablations"])
    found = {row["row"]: row for row in compare.ablations(every, None) if row["budget"] == 512}
    assert {"package defaults", "paper", "no re-rank", "all unstable", "none unstable"} <= set(
        found
    )
    assert {"paper, no re-rank", "sink_pages=0", "digests_per_page=2"} <= set(found)
    assert found["paper"]["KL / paper's"] == (1, 1, 1)
    assert found["package defaults"]["KL / defaults'"] == (1, 1, 1)
    row = found["no re-rank"]
    assert row["documents"] == 2
    kl = [
        [r["kl"] for r in rows_of(results, part, "leval-A", "patent_summ", method)]
        for part, method in (("ablations", _file(results, 0)), ("main", _file(results, None)))
    ]
    assert row["KL / paper's"].value == pytest.approx(np.mean(kl[0]) / np.mean(kl[1]))
    assert not math.isnan(row["KL / paper's"].low)


def _file(results, rerank):
    """The file of "no re-rank" under the default preset, or of the paper preset (None)."""
    part = "main" if rerank is None else "ablations"
    for path in (results / part / "leval-A" / "patent_summ").glob("flexicache-mask@512-*.jsonl"):
        options = json.loads(path.read_text().splitlines()[0])["method"]["options"]
        if rerank is None and options["preset"] == "paper":
            return path.name.split(".")[0]
        if options["rerank_interval"] == rerank and options["preset"] == "default":
            return path.name.split(".")[0]
    raise AssertionError("no such file")
