import csv
import json
import math

import numpy as np
import pytest

from eval.cli import main
from eval.report import compare, write_report
from eval.report.bootstrap import average, difference, pair, retention
from eval.report.collect import collect
from eval.report.tables import interval, number

DOCUMENTS = {str(i): str(i // 2) for i in range(8)}
HALF = {str(i): 20.0 + i for i in range(8)}
FULL = {name: 2 * value for name, value in HALF.items()}


def test_a_constant_ratio_has_no_spread():
    paired = pair(HALF, FULL, DOCUMENTS)
    assert (paired.rows, len(paired.count)) == (8, 4)
    assert retention([paired], 200) == pytest.approx((0.5, 0.5, 0.5))
    found = difference([paired], 200)
    assert found.value == pytest.approx(-23.5)
    assert found.low < found.value < found.high


def test_only_shared_rows_count():
    paired = pair({"0": 1.0, "1": 5.0}, {"1": 10.0, "2": 3.0}, DOCUMENTS)
    assert retention([paired], 50).value == 0.5
    assert math.isnan(retention([pair({}, {}, {})], 50).value)


def test_tasks_that_dense_fails_are_left_out_of_retention():
    zero = pair({"0": 1.0}, {"0": 0.0}, DOCUMENTS)
    assert retention([zero, pair(HALF, FULL, DOCUMENTS)], 50).value == pytest.approx(0.5)
    assert math.isnan(retention([zero], 50).value)


def test_rows_of_a_document_are_resampled_together():
    """Two documents of 50 equal rows: only 0, 1/2 or 1 of the rows can change."""
    rows = {str(i): float(i < 50) for i in range(100)}
    clustered = pair(rows, rows, {name: str(int(name) // 50) for name in rows})
    single = pair(rows, rows, {name: name for name in rows})
    wide, narrow = average([clustered], 500), average([single], 500)
    assert (wide.low, wide.high) == (0, 1)
    assert 0.35 < narrow.low < 0.5 < narrow.high < 0.65


def test_one_document_a_task_allows_no_interval():
    alone = pair({"0": 1.0}, {"0": 2.0}, DOCUMENTS)
    for found in (average([alone], 50), difference([alone, pair(HALF, FULL, DOCUMENTS)], 50)):
        assert math.isnan(found.low) and math.isnan(found.high) and not math.isnan(found.value)
    assert interval(average([alone], 50)) == "1.000"


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng, hits = np.random.default_rng(1), 0
    for _ in range(60):
        rows = {str(i): float(v) for i, v in enumerate(rng.normal(1, 0.5, 40))}
        found = average([pair(rows, rows, {name: name for name in rows})], 300)
        hits += found.low <= 1 <= found.high
    assert hits >= 52


def test_numbers():
    assert number(-1e-9, 2) == "0.00"
    assert number(None) == number(float("nan")) == "–"
    assert interval(retention([pair(HALF, FULL, DOCUMENTS)], 50)) == "0.500 [0.500, 0.500]"


def header(method, label, budget, measure):
    return {
        "kind": "header",
        "measure": measure,
        "started": "2026-01-01",
        "method": {"label": label, "options": {"budget": budget}},
        "model": {"name": "tiny", "dtype": "float32"},
        "rules": {"metric": "qasper", "context": 4096},
        "git": {"commit": "0123456789abcdef", "dirty": False},
        "versions": {"torch": "2"},
    }


def write_cell(root, task, method, label, budget, factor, attended):
    folder = root / "longbench-A" / task
    folder.mkdir(parents=True, exist_ok=True)
    tokens = {"attended": attended, "union": 0, "resident": attended, "moved": 2}
    tokens |= {"metadata": 0.0625, "length": 1000}
    for measure in ("answers", "fidelity"):
        lines = [header(method, label, budget, measure)]
        for i in range(6):
            row = {"id": str(i), "document_id": str(i), "tokens": tokens}
            if measure == "answers":
                row |= {"scores": {"score": factor * (0.4 + i / 100)}}
            else:
                row |= {"kl": (1 - factor) * (1 + i / 10), "top1": factor, "nll": 3 - factor}
            lines.append(row)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{method}.{measure}.jsonl").write_text(text)


@pytest.fixture
def folder(tmp_path):
    for task in ("qasper", "qasper2"):
        write_cell(tmp_path, task, "dense", "dense", 256, 1.0, 1000)
        for budget, factor in ((256, 0.8), (512, 0.9)):
            write_cell(tmp_path, task, f"quest@{budget}", "Quest", budget, factor, budget)
    return tmp_path


def test_report(folder):
    path = write_report([folder], resamples=100)
    text = path.read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("| Quest | 256 | 12 |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    # method, budget, rows, score, retention, attended, resident, moved, metadata, device bytes
    assert cells[3:10] == [
        "34.00",
        "0.800 [0.800, 0.800]",
        "256",
        "256",
        "2.0",
        "6.2 %",
        "31.9 %",
    ]
    assert cells[10].startswith("0.2500 [")
    assert cells[12] == "0.2000"
    assert "tiny (float32); context 4096 tokens; commit 0123456789ab;" in text
    for name in ("retention", "kl", "kl-attended"):
        name = f"longbench-A-{name}.png"
        assert (path.parent / name).read_bytes().startswith(b"\x89PNG")
        assert f"]({name})" in text
    with (path.parent / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    (row,) = [r for r in rows if (r["task"], r["method"]) == ("qasper", "quest@512")]
    assert float(row["retention"]) == pytest.approx(0.9)
    assert (row["dense_score"], row["score"]) == ("42.5", "38.25")


def test_dense_comes_first_and_budgets_ascend(folder):
    text = write_report([folder], resamples=20).read_text().partition("### Scores")[2]
    order = [line[2:].split(" |")[0:2] for line in text.splitlines() if line.startswith("| ")]
    names = [tuple(part.strip(" |") for part in row) for row in order][2:5]
    assert names == [("dense", "–"), ("Quest", "256"), ("Quest", "512")]


def test_compare(folder, tmp_path_factory, capsys):
    other = tmp_path_factory.mktemp("other")
    write_cell(other, "qasper", "quest@256", "Quest", 256, 0.9, 256)
    table = compare(str(folder), str(other), 100)
    (line,) = [line for line in table.splitlines() if "quest@256" in line]
    assert "| 34.00 | 38.25 | 4.25 [" in line
    assert "| 0.2500 | 0.1250 | -0.1250 [" in line

    table = compare(f"{folder}:quest@256", f"{folder}:dense", 100)
    assert table.count("| 34.00 | 42.50 | 8.50 [") == 2
    with pytest.raises(ValueError, match=r"no method 'nope'.*dense, quest@256"):
        compare(f"{folder}:nope", str(folder))
    assert main(["compare", str(folder / "none"), str(folder)]) == 2
    assert "neither a result folder" in capsys.readouterr().err


def test_the_same_rows_twice_are_an_error(folder):
    with pytest.raises(ValueError, match="dense on qasper again"):
        collect([folder, folder])
