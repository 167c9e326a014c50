import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from eval.paper import MODELS, SUITES, write_profiles
from eval.paper_numbers import LEVAL, LONGBENCH
from eval.settings import Settings
from flexicache_hf import HeadProfile

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("paper_tables", ROOT / "scripts/paper_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def mean_ratios(scores):
    rows = len(next(iter(scores.values())))
    return [sum(s[i] / s[0] for s in scores.values()) / len(scores) for i in range(rows)]


def test_published_scores_have_the_published_means():
    for model, means in (
        ("llama-3.1-8b", [1, 0.886, 0.962, 0.993, 0.988]),
        ("mistral-7b", [1, 0.883, 0.946, 0.968, 0.984]),  # the scores here have two decimals
    ):
        assert mean_ratios(LEVAL[model]) == pytest.approx(means, abs=0.0011)
    assert mean_ratios(LONGBENCH["llama-3.1-8b"])[1] == pytest.approx(1, abs=0.005)


def test_tables_have_the_papers_shape():
    tasks, rows = SUITES["leval"]
    assert (len(tasks), len(rows)) == (9, 5)
    tasks, rows = SUITES["longbench"]
    assert (len(tasks), len(rows)) == (16, 2)
    assert set(LONGBENCH["llama-3.1-8b"]) < set(tasks)


@pytest.mark.parametrize(
    ("model", "suite", "tasks"),
    [
        ("llama-3.1-8b", "leval", "gov_report_summ,patent_summ"),
        ("mistral-7b", "longbench", "qasper,trec"),
        ("qwen2.5-32b", "longbench", "gov_report"),
    ],
)
def test_dry_run_goes_through_and_prints_both(script, model, suite, tasks, tmp_path, capsys):
    command = ["--model", model, "--suite", suite, "--tasks", tasks, "--dry-run"]
    assert script([*command, "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = {line.split(" | ")[0].strip("| "): line for line in lines if line.startswith("|")}
    assert set(tasks.split(",")) < set(table)
    if model == "llama-3.1-8b":
        cells = table["patent_summ"].strip("| ").split(" | ")
        assert cells[1::2] == ["33.61", "23.12", "30.92", "31.69", "33.04"]
        assert "–" not in cells  # ours are there too
    assert script([*command, "--out", str(tmp_path)]) == 0
    assert "0 rows done" in capsys.readouterr().out


def test_authors_lists_become_profiles(data, tmp_path):
    model, heads = MODELS["llama-3.1-8b"], data / "flexicache_reference_heads.json"
    config = LlamaConfig(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    tasks, out = ("patent_summ", "gov_report_summ"), tmp_path / "profiles"
    pattern = write_profiles(model, config, heads, tasks, [1024], out)
    settings = Settings(
        model=model.repository,
        suite="leval",
        tasks=tasks,
        methods=("flexicache(preset=paper)",),
        budgets=(1024,),
        out=str(tmp_path),
        profile=pattern,
    )
    profiles = []
    for task in tasks:
        (method,) = settings.build_methods(task)
        profiles.append(HeadProfile.from_pretrained(method.profile))
    assert [len(profile.unstable_heads) for profile in profiles] == [64, 64]
    first, second = (set(profile.unstable_heads) for profile in profiles)
    assert first != second
    assert len(first & second) > 50
    with pytest.raises(ValueError, match="no unstable-80-profile"):
        write_profiles(replace(model, unstable_heads=80), config, heads, tasks, [1024], out)


def test_a_table_needs_a_profile(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script(["--model", "mistral-7b", "--suite", "leval", "--out", str(tmp_path)])
    assert "--heads or --profile" in capsys.readouterr().err
