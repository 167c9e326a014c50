import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from eval.cli import main
from eval.methods.flexicache import FlexiCacheMethod
from eval.results import ResultFile, find
from eval.runner import run
from eval.settings import Settings, method_key, method_label, parse_spec, split_outside_brackets
from flexicache_hf import FlexiCacheConfig, HeadProfile

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def settings(tmp_path, write_jsonl):
    rows = [
        {
            "context": f"Note {n // 2}. " + "The gate opens at seven and closes at nine. " * 12,
            "question": f"When does gate {n} open?",
            "answers": ["at seven"],
            "document_id": n // 2,
        }
        for n in range(4)
    ]
    path = write_jsonl(rows)
    return Settings(
        model="stand-in:llama",
        suite="custom",
        tasks=(str(path),),
        methods=("quest", "dense"),
        budgets=(64, 128),
        out=str(tmp_path / "out"),
        context=1500,
        max_new_tokens=6,
        fidelity_steps=5,
        device="cpu",
    )


def results(settings):
    """Rows by (protocol, task, method, measure) and id."""
    return {
        (group, task, file.method, file.measure): file.rows()
        for group, task, file in find(settings.out)
    }


def test_run_writes_every_row_once_with_provenance(settings):
    assert run(settings) == 0
    found = results(settings)
    assert {key[2:] for key in found} == {
        (method, measure)
        for method in ("dense", "quest@64", "quest@128")
        for measure in ("answers", "fidelity")
    }
    assert all(set(rows) == set("0123") for rows in found.values())
    row = found["custom-A", "rows", "quest@64", "answers"]["0"]
    assert 0 < row["tokens"]["attended"] < row["tokens"]["length"]
    assert row["scores"].keys() == {"score"}
    assert found["custom-A", "rows", "dense", "fidelity"]["1"]["kl"] == pytest.approx(0, abs=1e-5)

    head = next(f for *_, f in find(settings.out) if f.method == "quest@64").header()
    assert head["method"]["options"]["budget"] == 64
    assert head["model"]["name"] == "stand-in:llama"
    assert {"torch", "transformers", "rouge", "fuzzywuzzy"} <= head["versions"].keys()
    assert str(ROOT.parent) not in json.dumps(head)


def test_a_run_resumes_after_a_cut_off_line(settings):
    whole = replace(settings, out=settings.out + "-whole")
    run(whole)
    run(replace(settings, limit=2))
    (file,) = [f for *_, f in find(settings.out) if (f.method, f.measure) == ("dense", "answers")]
    text = file.path().read_text()
    file.path().write_text(text[:-20])  # killed while writing the second row
    assert len(file.rows()) == 1
    run(settings)
    assert results(settings) == results(whole)
    before = file.path().read_text()
    run(settings)  # nothing to do: not even a header is added
    assert file.path().read_text() == before


def test_rows_of_another_run_are_not_mixed_in(settings):
    run(settings)
    other = replace(settings, max_new_tokens=3, methods=("dense",), limit=2, fidelity_steps=0)
    path = Path(settings.out) / "custom-A" / "rows" / "dense.answers.jsonl"
    lines = path.read_text().splitlines()
    path.write_text(lines[0] + "\n")  # the header alone, so that there is something to do
    with pytest.raises(ValueError, match=r"dense\.answers\.jsonl: rules is .*another --out"):
        run(other)
    path.write_text(lines[0].replace('"label": "dense"', '"label": "full"') + "\n")
    assert run(replace(settings, methods=("dense",))) == 0  # a description may change


def test_protocol_b_shares_the_document_and_decodes_the_question(settings):
    settings = replace(settings, methods=("dense", "snapkv(window=16)"), budgets=(64,))
    run(settings)
    run(replace(settings, protocol="B"))
    found = results(settings)
    # Dense does not care when the question comes; a sparse method does.
    for measure in ("answers", "fidelity"):
        a_rows, b_rows = (found[f"custom-{p}", "rows", "dense", measure] for p in "AB")
        for name, row in a_rows.items():
            assert b_rows[name].get("prediction") == row.get("prediction")
            assert b_rows[name].get("kl", 0) == pytest.approx(row.get("kl", 0), abs=1e-5)
    (snapkv,) = {key[2] for key in found} - {"dense"}
    a_row, b_row = (found[f"custom-{p}", "rows", snapkv, "fidelity"]["1"] for p in "AB")
    assert a_row["kl"] != pytest.approx(b_row["kl"], rel=1e-3)


def test_batches_give_the_rows_of_one_by_one(settings):
    single = replace(settings, fidelity_steps=0)
    batch = replace(single, batch_size=3, out=settings.out + "-batch")
    run(single)
    run(batch)
    for key, rows in results(single).items():
        for name, row in rows.items():
            assert results(batch)[key][name]["prediction"] == row["prediction"]


def test_replayed_prompts_give_the_rows_of_prompts_run_anew(settings):
    settings = replace(settings, methods=("dense", "snapkv(window=16)", "h2o"), budgets=(64,))
    anew = replace(settings, replay=False, out=settings.out + "-anew")
    run(settings)
    run(anew)
    for key, rows in results(anew).items():
        for name, row in rows.items():
            found = results(settings)[key][name]
            assert found.get("prediction") == row.get("prediction")
            assert found.get("kl", 0) == pytest.approx(row.get("kl", 0), abs=1e-5)
            assert found["tokens"] == pytest.approx(row["tokens"])


def test_two_processes_do_the_work_of_one(settings):
    one = replace(settings, out=settings.out + "-one", fidelity_steps=0)
    run(one)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += [
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    command += ["-m", "eval", "run", "--device", "cpu", "--suite", "custom"]
    command += ["--model", one.model, "--tasks", one.tasks[0], "--methods", "dense,quest"]
    command += ["--budgets", "64,128", "--out", settings.out]
    command += ["--context", "1500", "--max-new-tokens", "6"]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, timeout=600)
    files = [file.paths() for *_, file in find(settings.out)]
    assert all(len(paths) == 2 for paths in files)
    assert results(settings) == results(one)


def test_method_specs():
    assert split_outside_brackets("a, b(c=1,d=2),e") == ["a", "b(c=1,d=2)", "e"]
    assert parse_spec("b(c=1, d=2)") == ("b", {"c": "1", "d": "2"})
    for bad in ("b(c)", "b(c=1", ""):
        with pytest.raises(ValueError, match="expected name"):
            parse_spec(bad)


def test_a_method_may_have_a_budget_of_its_own(settings):
    specs = ("dense@96", "quest", "quest(page=32)@64", "tova@96")
    methods = replace(settings, methods=specs).build_methods("")
    assert [(m.name, m.budget) for m in methods] == [
        ("dense", 96),
        ("quest", 64),
        ("quest", 128),
        ("quest", 64),
        ("tova", 96),
    ]
    assert [m.page for m in methods if m.name == "quest"] == [16, 16, 32]
    with pytest.raises(ValueError, match="or either with @budget"):
        replace(settings, methods=("quest@many",)).build_methods("")


def test_rows_of_other_defaults_are_not_continued(settings, monkeypatch):
    """FlexiCache's options leave choices to the package; its header says what they came to."""
    own = replace(
        settings, methods=("flexicache-mask(unstable=all)",), budgets=(64,), generation=False
    )
    assert run(own) == 0
    ((*_, file),) = find(own.out)
    resolved = file.header()["method"]["resolved"]
    assert resolved["token_budget"] == 64
    assert resolved["digest"] == FlexiCacheConfig().digest
    assert run(own) == 0  # nothing to do, nothing to refuse
    usual = FlexiCacheMethod.config
    changed = property(lambda self: usual.fget(self).replace(sink_pages=0))
    monkeypatch.setattr(FlexiCacheMethod, "config", changed)
    path = file.path()  # one row is missing, so that there is something to do
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match=r"'sink_pages': 1.* this run has .*'sink_pages': 0"):
        run(own)


def test_options_get_a_file_of_their_own(settings):
    specs = ("quest", "quest(page=32)", "quest(page=16)", "dense")
    methods = replace(settings, methods=specs, budgets=(64,)).build_methods("rows")
    keys = [method_key(method) for method in methods]
    assert keys[:2] == ["dense", "quest@64"]
    assert keys[2].startswith("quest@64-")
    assert keys[3] == "quest@64"


def test_labels_tell_methods_apart(settings):
    specs = (
        "quest",
        "quest(page=32)",
        "flexicache-mask(unstable=none)",
        "flexicache-mask(unstable=none,digests_per_page=2)",
    )
    methods = replace(settings, methods=specs, budgets=(64,)).build_methods("rows")
    labels = [method_label(method) for method in methods]
    assert labels[:2] == ["Quest", "Quest (page=32)"]
    assert labels[3] == f"{labels[2]} (digests_per_page=2)"
    assert "none unstable" in labels[2]
    assert "unstable=" not in labels[2]


def test_profile_of_task_and_budget(settings, tiny_model, tmp_path):
    for budget in (64, 128):
        heads = [(budget // 64, 0)]
        profile = HeadProfile.from_unstable_heads(tiny_model.config, heads)
        profile.save_pretrained(tmp_path / f"rows-{budget}")
    path = str(tmp_path / "{task}-{budget}")
    specs = ("flexicache", "flexicache(unstable=none)")
    settings = replace(settings, methods=specs, profile=path, limit=1)
    methods = settings.build_methods("rows")
    expected = [str(tmp_path / "rows-64"), str(tmp_path / "rows-128"), None, None]
    assert [method.profile for method in methods] == expected
    assert [method_key(method) for method in methods][:2] == ["flexicache@64", "flexicache@128"]
    assert run(settings) == 0
    header = next(f for *_, f in find(settings.out) if f.method == "flexicache@128").header()
    assert header["method"]["options"]["profile"]["name"] == "rows-128"
    assert len(header["method"]["options"]["profile"]["sha256"]) == 64


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--methods", "nope"], "no method 'nope'"),
        (["--methods", "quest(pages=3)"], "no option 'pages'"),
        (["--tasks", "nope"], "no task nope in ruler"),
        (["--protocol", "B", "--batch-size", "2"], "one question at a time"),
        (["--no-generation"], "nothing to measure"),
        (["--limit", "0"], "limit is 0"),
        (["--skip", "-1"], "skip is -1"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(extra, message, tmp_path, capsys):
    command = ["run", "--model", "stand-in:no-such-type", "--suite", "ruler", "--tasks", "passkey"]
    command += ["--methods", "dense", "--out", str(tmp_path), *extra]
    assert main(command) == 2
    assert message in capsys.readouterr().err


def test_a_line_separator_inside_a_text_is_no_line(tmp_path):
    file = ResultFile(tmp_path, "dense", "answers")
    file.append({"id": "1", "prediction": "a\u2028b\x85c\r\nd"}, 0)
    file.path().write_bytes(file.path().read_bytes() + b'{"id": "2", "pre')
    assert file.rows() == {"1": {"id": "1", "prediction": "a\u2028b\x85c\r\nd"}}


def test_no_results_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no results"):
        list(find(tmp_path))
    assert ResultFile(tmp_path, "dense", "answers").header() is None
