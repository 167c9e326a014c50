"""Published prediction files get their official scores, to the last printed digit."""

import json

import pytest

from eval.metrics.leval import KINDS
from eval.metrics.longbench import METRICS
from eval.predictions import read_jsonl, read_predictions
from eval.scoring import row_scores, score_file, task_metric

LEVAL_TASKS = [task for task, kind in KINDS.items() if kind != "exam"]


@pytest.mark.parametrize("model", ["turbo-16k-0613", "llama2-13b-chat-4k"])
@pytest.mark.parametrize("task", LEVAL_TASKS)
def test_leval(data, model, task):
    golden = json.loads((data / "leval_golden_scores.json").read_text())[model][task]
    score = score_file("leval", task, data / "leval_preds" / model / f"{task}.pred.jsonl")
    assert score.n == golden["n"]
    assert score.scores == {key: golden[key] for key in score.scores}
    assert set(score.scores) == set(golden) - {"n", "kind", "pred_words"}


@pytest.mark.parametrize("task", METRICS)
def test_longbench(data, task):
    golden = json.loads((data / "longbench_golden_scores.json").read_text())[task]
    path = data / "longbench_preds" / f"{task}.jsonl"
    score = score_file("longbench", task, path)
    assert (score.n, score.scores) == (golden["n"], {"score": golden["score"]})

    rows = row_scores(task_metric("longbench", task), read_predictions(path))
    expected = [row["score"] for row in read_jsonl(path)]
    assert [row["score"] for row in rows] == pytest.approx(expected, abs=1e-6)


def test_every_golden_file_is_covered(data):
    leval = json.loads((data / "leval_golden_scores.json").read_text())
    assert {task for model in leval.values() for task in model} == set(LEVAL_TASKS)
    assert set(json.loads((data / "longbench_golden_scores.json").read_text())) == set(METRICS)
