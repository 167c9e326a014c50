"""`flexicache profile`: the whole way from prompts to a shown profile, in one and two processes."""

import argparse
import json
import os
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flexicache_hf.cli.profile import add_parser, main
from flexicache_hf.profiles.profile import HeadProfile
from flexicache_hf.profiles.records import load_record

WORDS = {"<unk>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, 64)}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    raw = Tokenizer(WordLevel(WORDS, unk_token="<unk>"))
    raw.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "own.jsonl"
    generator = torch.Generator().manual_seed(3)
    rows = [
        {
            "task": task,
            "document": " ".join(
                f"w{i}" for i in torch.randint(2, 64, (80,), generator=generator).tolist()
            ),
            "instruction": "w2 w3",
        }
        for _ in range(3)
        for task in ("a", "b")
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def collect_arguments(model_dir, prompts, out, documents="2"):
    return [
        "collect", "--model", str(model_dir), "--prompts", str(prompts), "--out", str(out),
        "--documents", documents, "--steps", "36", "--top-k", "6", "--page-sizes", "4", "8",
        "--max-prompt-tokens", "60", "--device", "cpu",
    ]  # fmt: skip


def test_from_prompts_to_a_shown_profile(model_dir, prompts, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    records, out = tmp_path / "records", tmp_path / "out"
    assert main(collect_arguments(model_dir, prompts, records)) == 0
    assert "4/4 b/0003" in capsys.readouterr().err
    assert main(collect_arguments(model_dir, prompts, records)) == 0
    assert capsys.readouterr().err.count("had a record") == 4

    analyse = ["analyse", str(records), "--out", str(out), "--top-k", "6", "--compare", "2", "4"]
    assert main([*analyse, "--page-size", "4", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == ["2", "4", "6"]
    assert figures["6"]["windows"] == 8  # four documents of two whole windows
    assert (figures["6"]["unstable_heads"], figures["6"]["chance"]) == (1, 0.25)
    assert 0 <= figures["6"]["task_overlap"] <= 1
    names = {path.name for path in out.iterdir()}
    assert names == {
        "head_profile.json", "report.md", "stability.png", "offsets.png", "overlap.png"
    }  # fmt: skip
    profile = HeadProfile.from_pretrained(out)
    assert (profile.page_size, profile.top_k_pages, profile.tasks) == (4, 6, ("a", "b"))

    assert main(["show", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "| unstable heads (M) | 1 of 4 |" in shown
    assert main(["show", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unstable_heads"] == [
        list(pair) for pair in profile.unstable_heads
    ]


def test_two_processes_share_the_documents(model_dir, prompts, tmp_path):
    pytest.importorskip("accelerate")
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert main(collect_arguments(model_dir, prompts, alone, "3")) == 0
    launch = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
        "--main_process_port", "0", "-m", "flexicache_hf.cli.profile",
    ]  # fmt: skip
    # --multi_gpu is accelerate's word for several processes on one machine; these have no GPU.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launch, *collect_arguments(model_dir, prompts, together, "3")],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"[{rank}] 3/3" in done.stderr
    expected = sorted(path.relative_to(alone) for path in alone.rglob("*.safetensors"))
    assert len(expected) == 6
    assert sorted(path.relative_to(together) for path in together.rglob("*.*")) == expected
    for path in expected:
        one, two = load_record(alone / path), load_record(together / path)
        assert torch.equal(one.pages[4], two.pages[4])


def test_a_dataset_on_disk(model_dir, tmp_path):
    pytest.importorskip("datasets")
    lines = [json.dumps({"text": f"w{i} " * 70}) for i in range(2, 6)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(lines))
    arguments = collect_arguments(model_dir, "", tmp_path / "records")
    place = arguments.index("--prompts")
    arguments[place : place + 2] = ["--dataset", str(tmp_path / "data"), "--skip", "1"]
    assert main(arguments) == 0
    found = sorted(p.name for p in (tmp_path / "records").rglob("*.safetensors"))
    assert found == ["0001.safetensors", "0002.safetensors"]


def test_leval_and_longbench_files(model_dir, tmp_path):
    (tmp_path / "leval").mkdir()
    (tmp_path / "longbench").mkdir()
    row = {"input": "w5 " * 80, "instructions": ["w7 w8"], "outputs": ["w9"], "evaluation": "f1"}
    (tmp_path / "leval" / "qa.jsonl").write_text(json.dumps(row))
    row = {"context": "w6 " * 80, "input": "", "answers": ["w9"]}
    (tmp_path / "longbench" / "report.jsonl").write_text(json.dumps(row))
    arguments = collect_arguments(model_dir, "", tmp_path / "records")
    place = arguments.index("--prompts")
    data = ["--leval", "qa", "--longbench", "report", "--data", str(tmp_path)]
    arguments[place : place + 2] = data
    assert main(arguments) == 0
    found = sorted(p.parent.name for p in (tmp_path / "records").rglob("*.safetensors"))
    assert found == ["qa", "report"]


def test_show_of_a_bundled_profile(capsys):
    assert main(["show", "HuggingFaceTB/SmolLM2-135M-Instruct"]) == 0
    assert "| unstable heads (M) | 22 of 90 |" in capsys.readouterr().out


def test_import_of_a_list(model_dir, tmp_path, capsys):
    lists = {"org/Tiny": {"unstable-1-profile-gov_report-topk-64": [[1, 0]]}}
    (tmp_path / "lists.json").write_text(json.dumps(lists))
    arguments = ["import", str(tmp_path / "lists.json"), "--model-id", "org/Tiny"]
    assert main([*arguments, "--config", str(model_dir), "--out", str(tmp_path / "out")]) == 0
    assert HeadProfile.from_pretrained(capsys.readouterr().out.strip()).unstable_heads == ((1, 0),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["analyse", "nowhere", "--out", "x"], "no records under nowhere"),
        (["show", "./nowhere"], "neither a file, nor a directory, nor the id"),
        (["collect", "--out", "x", "--leval", "t", "--data", "nowhere"], "no data at nowhere"),
        (["collect", "--out", "x"], "no text to generate about"),
    ],
)
def test_mistakes_end_in_one_line(arguments, message, model_dir, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if arguments[0] == "collect":
        arguments = [*arguments, "--model", str(model_dir)]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_the_commands_hang_under_one_word():
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["profile", "analyse", "r", "--out", "o"])
    assert args.run.__name__ == "run_analyse"
