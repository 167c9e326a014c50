import argparse
import json

import pytest

from eval.cli import add_parser, main
from eval.predictions import read_predictions
from eval.scoring import score_file

LEVAL = {"query": "q", "gt": "the red fox", "m_pred": "Red fox", "evaluation": "f1"}
LONGBENCH = {"pred": "red fox", "answers": ["x", "fox"], "all_classes": None, "length": 10}
OURS = {"id": "3", "prediction": "red fox", "references": ["fox"]}


def test_four_formats_are_read(write_jsonl):
    header = {"kind": "header", "suite": "leval"}
    ruler = {"index": 0, "pred": "red fox", "outputs": ["fox"]}
    rows = read_predictions(write_jsonl([header, LEVAL, LONGBENCH, OURS, ruler]))
    assert [row.prediction.lower() for row in rows] == ["red fox"] * 4
    assert [row.references[-1] for row in rows] == ["the red fox", "fox", "fox", "fox"]
    assert rows[2].id == "3"


def test_rows_for_judges_are_left_out(write_jsonl):
    path = write_jsonl([LEVAL, LEVAL | {"evaluation": "LLM"}, LEVAL | {"evaluation": "human"}])
    score = score_file("leval", "financial_qa", path)
    assert (score.n, score.scores) == (1, {"f1": 100.0})


def test_longbench_e_scores_by_length(write_jsonl):
    rows = [LONGBENCH | {"length": n, "answers": [a]} for n, a in ((10, "fox"), (9000, "cat"))]
    score = score_file("longbench", "qasper_e", write_jsonl(rows))
    assert score.buckets == {"0-4k": 66.67, "8k+": 0.0}
    with pytest.raises(ValueError, match="row 3 has no length"):
        score_file("longbench", "qasper_e", write_jsonl([OURS]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [([{"text": "x"}], "fields are text; expected prediction"), ([], "no rows to score")],
)
def test_unusable_files_say_why(write_jsonl, rows, message, capsys):
    command = ["score", "--suite", "leval", "--task", "financial_qa", "--predictions"]
    assert main([*command, str(write_jsonl(rows))]) == 2
    assert message in capsys.readouterr().err


def test_broken_line_is_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("\n{oops\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:2: not JSON"):
        read_predictions(path)


def test_command_below_another_program(write_jsonl, capsys):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    path = str(write_jsonl([LEVAL]))
    base = ["eval", "score", "--suite", "leval", "--task", "patent_summ", "--predictions", path]
    args = parser.parse_args([*base, "--json"])
    assert args.run(args) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["score"], result["main"], result["n"]) == (80.0, "rougeL", 1)
    assert set(result["scores"]) == {"rouge1", "rouge2", "rougeL", "geo"}

    args = parser.parse_args(base)
    assert args.run(args) == 0
    assert "80.0 (rougeL, 1 rows)" in capsys.readouterr().out
