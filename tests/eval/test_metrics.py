import subprocess
import sys
import textwrap

import evaluate
import pytest

from eval.metrics import exam, get_metric
from eval.metrics.longbench import LongBenchMetric, bucket, classification, code_similarity
from eval.metrics.ruler import clean


def test_metrics_are_evaluate_metrics_and_combine_batches():
    metric = get_metric("longbench", "qasper")
    assert isinstance(metric, evaluate.Metric)
    assert metric.compute(predictions=["The cat"], references=[["a cat", "dog"]]) == {"score": 100}
    metric.add_batch(predictions=["cat", "x"], references=[["cat"], ["dog"]])
    assert metric.compute() == {"score": 50.0}


def test_unknown_task_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"no task 'qaspar'.*qasper"):
        get_metric("longbench", "qaspar")
    with pytest.raises(ValueError, match="no rows"):
        get_metric("longbench", "qasper").summarise([])


@pytest.mark.parametrize(
    ("prediction", "letter"),
    [("B", "B"), ("The answer is C.", "C"), ("Answer: D", "A"), ("none", "A"), ("", "")],
)
def test_one_choice(prediction, letter):
    assert exam.one_choice(prediction) == letter


@pytest.mark.parametrize(
    ("prediction", "letters"),
    [
        ("CAB because", "ABC"),  # two or more at the start are the answer
        ("A. and C) too", "AC"),
        ("B Question 2. C.", "B"),  # what follows the next question does not count
        ("I think B is right", "B"),
        ("nothing", "A"),
        ("BCD", "BCD"),
    ],
)
def test_many_choices(prediction, letters):
    assert exam.many_choices(prediction) == letters


@pytest.mark.parametrize(
    ("prediction", "score"), [("ABC", 1.0), ("AB", 0.25), ("A.", 0.25), ("AD", 0.0), ("D", 0.0)]
)
def test_coursera_gives_a_quarter_for_an_incomplete_set(prediction, score):
    assert exam.EXAMS["coursera"](prediction, "ABC") == score


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("so the total.\nThe answer is $1,218.50", 1.0),  # digits before the point only
        ("There are 3 and then 1218 eggs\n\nQuestion: 5", 1.0),
        ("The answer is 1219", 0.0),
        ("no idea", 0.0),
    ],
)
def test_gsm100(prediction, score):
    assert exam.EXAMS["gsm100"](prediction, "1218") == score


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("The first topic: the role of  ART in society.", 1.0),
        ("\nx\nRole of art in society is the topic", 1.0),  # lines of one character are skipped
        ("Something else\nthe role of art in society", 0.0),  # the first real line counts
    ],
)
def test_topic_retrieval(prediction, score):
    assert exam.EXAMS["topic_retrieval_longchat"](prediction, "role of art in society") == score


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("True [fact: False]", 1.0),
        ("false. [fact: it is false]", 0.5),
        ("True", 0.5),
        ("maybe [fact: so]", 0.0),
    ],
)
def test_sci_fi_is_the_mean_of_loyalty_and_fact(prediction, score):
    assert exam.EXAMS["sci_fi"](prediction, "True [fact: False]") == score


def test_code_output():
    assert exam.EXAMS["codeU"]("the final output is [1, 2]", "[1, 2]") == 1.0
    assert exam.EXAMS["codeU"]("prints [1, 3]", "[1, 2]") == 0.0


def test_classification_keeps_the_official_skip_after_a_removal():
    # "Air" is removed as part of "Airport"; the next name, "port", is then never looked at.
    classes = ["Air", "port", "Airport"]
    assert classification("Airport", "Airport", classes) == 1 / 2
    assert classification("Rail", "Airport", classes) == 0.0
    with pytest.raises(ValueError, match="all_classes"):
        LongBenchMetric("trec").row("x", ["y"])


def test_first_line_and_code_rules():
    assert LongBenchMetric("triviaqa").row("\n\nParis\nLondon", ["Paris"])["score"] == 1
    assert LongBenchMetric("hotpotqa").row("Paris\nLondon", ["Paris"])["score"] < 1
    assert code_similarity("```python\n# note\nreturn x", "return x") == 1
    assert code_similarity("# only a note", "return x") == 0


def test_retrieval_and_count_share():
    retrieval = LongBenchMetric("passage_retrieval_en")
    assert retrieval.row("Paragraph 3 or 4", ["Paragraph 3"])["score"] == 0.5
    assert LongBenchMetric("passage_retrieval_zh").row("段落13", ["段落3"])["score"] == 0
    assert LongBenchMetric("passage_count").row("7 or 7 or 8", ["7"])["score"] == 2 / 3


def test_rouge_of_nothing_is_zero():
    for text in ("", "...", "   "):
        assert LongBenchMetric("qmsum").row(text, ["A summary."])["score"] == 0


def test_longbench_e_buckets():
    assert [bucket(n) for n in (0, 3999, 4000, 7999, 8000)] == ["0-4k"] * 2 + ["4-8k"] * 2 + ["8k+"]


def test_ruler_recall():
    assert get_metric("ruler", "vt").row("abc DEF", ["ABC", "def", "x"]) == {"score": 2 / 3}
    assert get_metric("ruler", "qa_1").row("the answer\x00two", ["one", "Two"]) == {"score": 1}
    assert clean(" a\tb\x07 ") == "a\nb"


def test_an_installed_levenshtein_does_not_change_code_scores(tmp_path):
    """fuzzywuzzy would take its ratio from python-Levenshtein, if it can be imported."""
    (tmp_path / "Levenshtein.py").write_text(
        textwrap.dedent("""
            def ratio(*texts): return 0.0
            opcodes = editops = matching_blocks = distance = ratio
        """)
    )
    program = (
        "import warnings; warnings.simplefilter('error')\n"
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import fuzzywuzzy.fuzz as public\n"
        "assert public.SequenceMatcher.__module__ == 'fuzzywuzzy.StringMatcher'\n"
        "from eval.metrics.similarity import edit_ratio\n"
        "assert edit_ratio('return x', 'return y') == 0.88, edit_ratio('return x', 'return y')\n"
        "import fuzzywuzzy.StringMatcher  # the other copy is left as it was\n"
        "assert public.ratio('return x', 'return y') == 0\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
