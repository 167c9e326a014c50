"""Published FlexiCache numbers (arXiv 2511.00868), to print beside ours.

L-Eval: raw scores in the authors' evaluation notebook, which the paper's retention table comes
from. LongBench: the reference numbers of the authors' artifact and the paper's average ratios.
"""

from __future__ import annotations

from eval.tasks.leval import PAPER_TASKS

# Rows of the ablation: name, method, budget.
ABLATION = (
    ("dense", "dense", 1024),
    ("no re-rank, K 64", "flexicache(preset=paper,rerank_interval=0,unstable=none)", 1024),
    ("re-rank, 0 unstable, K 64", "flexicache(preset=paper,unstable=none)", 1024),
    ("+ unstable set, K 64", "flexicache(preset=paper)", 1024),
    ("+ unstable set, K 128", "flexicache(preset=paper)", 2048),
)
LONGBENCH_ROWS = (ABLATION[0], ABLATION[3])  # K 64


def _leval(*rows: tuple[float, ...]) -> dict[str, tuple[float, ...]]:
    return dict(zip(PAPER_TASKS, rows, strict=True))


LEVAL = {  # task: one score for each row of ABLATION
    "llama-3.1-8b": _leval(
        (49.61, 43.28, 49.05, 51.90, 50.78),
        (27.19, 26.74, 26.18, 28.89, 26.24),
        (37.20, 22.63, 29.38, 37.74, 38.07),
        (17.95, 16.85, 17.72, 17.53, 17.38),
        (17.45, 17.27, 17.14, 17.69, 17.95),
        (21.18, 19.22, 20.40, 20.97, 20.78),
        (33.61, 23.12, 30.92, 31.69, 33.04),
        (16.76, 16.40, 16.71, 16.75, 16.48),
        (15.46, 15.58, 16.52, 13.79, 14.50),
    ),
    "mistral-7b": _leval(
        (48.48, 41.13, 45.96, 47.45, 46.58),
        (27.46, 24.72, 27.69, 28.32, 28.23),
        (35.31, 28.34, 29.18, 31.78, 34.39),
        (14.79, 14.27, 13.63, 14.27, 14.42),
        (15.44, 15.89, 16.43, 17.14, 16.77),
        (21.13, 18.20, 19.78, 20.65, 20.45),
        (31.70, 22.77, 29.06, 27.43, 30.33),
        (15.73, 14.72, 15.84, 15.70, 16.00),
        (15.22, 13.40, 13.48, 13.47, 13.52),
    ),
}
LONGBENCH = {  # task: dense, FlexiCache
    "llama-3.1-8b": {
        "qasper": (45.23, 45.92),
        "multifieldqa_en": (54.93, 54.94),
        "2wikimqa": (45.45, 45.32),
        "musique": (30.18, 31.22),
        "gov_report": (34.98, 34.22),
        "multi_news": (27.18, 27.10),
        "triviaqa": (91.64, 91.49),
        "repobench-p": (49.43, 49.70),
    },
}
# What is known of the rest, in words.
NOTES = {
    ("longbench", "llama-3.1-8b"): "Published average ratio to dense: 1.00.",
    ("longbench", "mistral-7b"): "Published average ratio to dense: 0.99; scores are not known.",
    ("longbench", "mistral-small-24b"): "Published scores are not known.",
    ("longbench", "qwen2.5-32b"): "Published scores are not known.",
    ("leval", "mistral-small-24b"): "Published retention at K 128: 0.99 to 1.00 over the models.",
    ("leval", "qwen2.5-32b"): "Published retention at K 128: 0.99 to 1.00 over the models.",
}
