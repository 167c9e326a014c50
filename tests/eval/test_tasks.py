import json
import re
import zipfile
from collections import Counter

import pytest

from eval.encode import encode, render, stop_ids
from eval.predictions import read_jsonl
from eval.tasks import Prompt, Request, files, get_task, task_names
from eval.tasks.base import Example, cut_middle, fill, spread
from eval.tasks.leval import PAPER_TASKS, build_prompt, cut_words
from eval.tasks.longbench import ENGLISH_AND_CODE, NO_CHAT, WITH_E
from eval.tasks.ruler_lists import insert_in_order


@pytest.fixture
def request_for(tokenizer):
    def make(context=2048, **kwargs):
        return Request(tokenizer, context, **kwargs)

    return make


def test_suites_are_complete():
    assert len(task_names("longbench")) == 21 + 13
    assert len(WITH_E) == 13
    assert len(ENGLISH_AND_CODE) == 16
    assert len(task_names("leval")) == 20
    assert set(PAPER_TASKS) < set(task_names("leval"))
    assert len(task_names("ruler")) == 13 + 2
    with pytest.raises(ValueError, match="known: narrativeqa"):
        get_task("longbench", "nope")


def test_chat_template_rule():
    assert {n for n in task_names("longbench") if n.removesuffix("_e") in NO_CHAT} >= set(NO_CHAT)
    samsum = get_task("longbench", "samsum_e")
    assert (samsum.min_new_tokens, samsum.stop_at_newline, samsum.max_new_tokens) == (1, True, 128)


def test_fill_leaves_braces_of_values_alone():
    assert fill("{a}-{b}-{a}", a="{b}", b="{x}") == "{b}-{x}-{b}"


def test_spread_takes_equal_distances():
    rows = [Example(str(i), Prompt("", ""), [], "") for i in range(10)]
    assert [row.id for row in spread(rows, 4)] == ["0", "2", "5", "7"]
    assert spread(rows, None) == spread(rows, 99) == rows


def test_middle_is_cut_and_the_question_kept(request_for, tokenizer):
    prompt = Prompt("word " * 900, " last question?", lead="first ")
    cut = cut_middle(500)(prompt, request_for(context=700))
    assert cut.question == prompt.question
    assert cut.text.startswith("first word")
    assert len(tokenizer(cut.text).input_ids) <= 200
    short = Prompt("word", "?")
    assert cut_middle(500)(short, request_for(context=700)) is short


def test_words_are_cut_off_the_right_end(tokenizer):
    document = " ".join(f"w{i}" for i in range(800))
    kept = cut_words(tokenizer, document, 1000)
    assert document.startswith(kept)
    assert len(tokenizer(kept).input_ids) <= 1000
    # The rule is coarse: the first `limit - n` words, n = 0, 250, ... until it fits.
    assert len(cut_words(tokenizer, document, 3900).split()) == 800
    assert len(cut_words(tokenizer, document, 2500).split()) == 500
    end = cut_words(tokenizer, document, 1000, keep_end=True)
    assert document.endswith(end)
    # A tokenizer with many tokens a word: the benchmark's rule would run out of words.
    assert len(tokenizer(cut_words(tokenizer, "long-word " * 99, 100)).input_ids) <= 100


def test_leval_length_instruction():
    prompt = build_prompt("gov_report_summ", "DOC", "Summarise.", "four words of text")
    expected = "Document is as follows. DOC Instruction: Summarise. \nAnswer this question with"
    assert prompt.text == f"{expected} 4 words."


def test_rows_of_judges_are_left_out_and_sci_fi_asks_twice(request_for, write_jsonl, tmp_path):
    row = {
        "input": "A story.",
        "instructions": ["1. Ships fly, True or False? Answer by the document."],
        "outputs": ["True [fact: False]"],
        "source": "x",
    }
    write_jsonl([row | {"evaluation": "exam"}, row | {"evaluation": "human"}], "sci_fi.jsonl")
    (example,) = get_task("leval", "sci_fi").examples(request_for(source=str(tmp_path)))
    assert "A story." not in example.fact.text
    assert example.fact.question.startswith("1. Ships fly, True or False? Answer True")


LONGBENCH_ROW = {
    "input": "Who?",
    "context": "Ann met {Bob}.",
    "answers": ["Ann"],
    "length": 4,
    "dataset": "qasper",
    "language": "en",
    "all_classes": None,
    "_id": "a1",
}


def test_official_templates_can_be_given(request_for, write_jsonl, tmp_path):
    write_jsonl([LONGBENCH_ROW], "qasper.jsonl")
    prompts = {"qasper": "Text: {context} Q: {input} A:"}
    request = request_for(source=str(tmp_path), prompts=prompts)
    (example,) = get_task("longbench", "qasper").examples(request)
    assert example.prompt.text == "Text: Ann met {Bob}. Q: Who? A:"
    assert (example.id, example.references, example.length) == ("a1", ["Ann"], 4)


def test_longbench_is_read_from_its_archive(request_for, tmp_path, monkeypatch):
    """The Hub holds one data.zip; a chained address reads a member of it."""
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("data/qasper.jsonl", json.dumps(LONGBENCH_ROW) + "\n")
    address = f"zip://data/{{task}}.jsonl::{archive}"
    monkeypatch.setitem(files.HUB, "longbench", address)
    # `datasets` takes a chained address for a remote one, wherever the archive is.
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    (example,) = get_task("longbench", "qasper").examples(request_for())
    assert example.prompt.document == "Ann met {Bob}."


def test_missing_file_says_what_to_do(request_for, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no qasper\.jsonl.*--data"):
        get_task("longbench", "qasper").examples(request_for(source=str(tmp_path)))


def test_custom_rows(request_for, write_jsonl):
    path = write_jsonl([{"context": "c", "question": "q?", "answers": ["a"], "id": 7}])
    task = get_task("custom", f"{path}:exact")
    (example,) = task.examples(request_for())
    assert (task.name, task.metric, example.id) == ("rows", "exact", "7")
    with pytest.raises(ValueError, match="expected one of f1"):
        get_task("custom", f"{path}:bleu")
    bad = write_jsonl([{"context": "c"}], "bad.jsonl")
    with pytest.raises(ValueError, match="row 1 lacks question, answers"):
        get_task("custom", str(bad)).examples(request_for())


def test_both_protocols_see_the_same_ids(tokenizer):
    prompt = Prompt("the document", " and the question?", system="be brief", cue="It is")
    coded = encode(prompt, tokenizer)
    text, special = render(prompt, tokenizer)
    assert coded.ids == tokenizer(text, add_special_tokens=special).input_ids
    assert tokenizer.decode(coded.ids[: coded.split]).rstrip().endswith("the document")
    assert tokenizer.decode(coded.ids[coded.split :]).strip().startswith("and the question?")
    assert tokenizer.decode(coded.ids).endswith("It is")


def test_system_text_moves_where_the_template_refuses_it(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    text, _ = render(Prompt("doc", " ask?", system="be brief"), tokenizer)
    assert text == "<user>be brief\n\ndoc ask?"
    text, _ = render(Prompt("doc", " ask?", chat=False), tokenizer)
    assert text == "doc ask?"


def test_stop_ids(tiny_model, tokenizer):
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
    tiny_model.generation_config.eos_token_id = [3, 4]
    assert stop_ids(tiny_model, tokenizer) == {3, 4, tokenizer.eos_token_id}
    assert newline in stop_ids(tiny_model, tokenizer, newline=True)


RULER = [name for name in task_names("ruler") if not name.startswith("qa_")]


@pytest.mark.parametrize("name", RULER)
def test_generated_tasks_fill_the_context(name, request_for, tokenizer):
    task = get_task("ruler", name)
    context = 6000 if name == "cwe" else 3000
    if name == "cwe":
        context = 12000  # ten words times thirty are long in bytes
    examples = task.examples(request_for(context, samples=3))
    assert examples == task.examples(request_for(context, samples=3))
    for example in examples:
        size = len(encode(example.prompt, tokenizer).ids) + task.max_new_tokens
        assert 0.75 * context < size <= context
        for reference in example.references:
            assert reference in example.prompt.document
            assert reference not in example.prompt.question + example.prompt.cue
        perfect = task.scorer().row(" ".join(example.references), example.references)
        assert perfect["score"] == 1


def test_needle_template_is_that_of_published_samples(data, request_for):
    """RULER's own rows, with every uuid replaced, start, go on and end like ours."""
    path = data / "ruler" / "niah_multikey_3_4096.jsonl"
    published = next(read_jsonl(path))["input"]
    (example,) = get_task("ruler", "niah_multikey_3").examples(request_for(3000, samples=1))
    ours = f"{example.prompt.text} {example.prompt.cue}"
    parts = []
    for text in (published, ours):
        lines = re.sub(r"[0-9a-f-]{12,}", "UUID", text).split("\n")
        parts.append((lines[0], set(lines[1:-1]), lines[-1]))
    assert parts[0] == parts[1]


def test_needles_are_spread_over_the_depths(request_for):
    documents = [e.prompt.document for e in get_task("ruler", "passkey").examples(request_for())]
    places = [document.find("The pass key is") / len(document) for document in documents]
    assert places[0] == 0
    assert places[-1] > 0.9
    assert places == sorted(places)


def test_common_and_frequent_words_are_what_they_say(request_for):
    (example,) = get_task("ruler", "cwe").examples(request_for(12000, samples=1))
    counts = Counter(example.prompt.document.split()[1::2])
    assert {counts[word] for word in example.references} == {30}
    assert max(n for word, n in counts.items() if word not in example.references) == 3
    (example,) = get_task("ruler", "fwe").examples(request_for(8000, samples=1))
    ranked = [word for word, _ in Counter(example.prompt.document.split()).most_common(4)]
    assert ranked == ["...", *example.references]


def test_chains_keep_their_order():
    assert insert_in_order(["-", "-"], ["a", "b", "c"], [0.1, 0.2, 1.0]) == list("ab--c")


def test_ruler_qa_reads_squad_and_hotpot(request_for, tmp_path, tokenizer):
    paragraphs = [
        {
            "context": f"Fact {i} is f{i}. " * 5,
            "qas": [{"question": f"What is {i}?", "answers": [{"text": f"f{i}"}] * 2}],
        }
        for i in range(30)
    ]
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    hotpot = [
        {"question": f"q{i}", "answer": f"a{i}", "context": [[f"T{i}", ["one. ", f"a{i}."]]]}
        for i in range(9)
    ]
    (tmp_path / "hotpotqa.json").write_text(json.dumps(hotpot))
    for name, answer in (("qa_1", "f1"), ("qa_2", "a1")):
        examples = get_task("ruler", name).examples(request_for(source=str(tmp_path), samples=3))
        assert examples[1].references == [answer]
        assert examples[1].prompt.document.count("Document ") > 5
        assert answer in examples[1].prompt.document
    with pytest.raises(FileNotFoundError, match=r"squad\.json"):
        get_task("ruler", "qa_1").examples(request_for())


def test_skipped_documents_lose_all_their_questions(request_for, tmp_path):
    rows = [{"context": "c", "question": "q", "answers": ["a"], "document_id": d} for d in "xxyz"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = get_task("custom", f"{path}:f1")
    kept = [e.document_id for e in task.examples(request_for(), limit=2, skip=1)]
    assert kept == ["y", "z"]
    assert task.examples(request_for(), skip=3) == []


def test_every_given_file_makes_prompts(data, tokenizer):
    for suite in ("longbench", "leval"):
        request = Request(tokenizer, 4096, source=str(data / suite))
        for path in sorted((data / suite).glob("*.jsonl")):
            (example,) = get_task(suite, path.stem).examples(request, limit=1)
            coded = encode(example.prompt, tokenizer)
            assert 0 < coded.split < len(coded.ids)
            assert example.references
