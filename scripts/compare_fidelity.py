"""Teacher-forced fidelity of methods against each other, on the rows that both have.

    python scripts/compare_fidelity.py targets runs/main --csv targets.csv
    python scripts/compare_fidelity.py ablations runs/main runs/ablations --csv ablations.csv

Reads result folders of `python -m eval run`. `targets` holds one method (`--method`) against every
other one at the same budget (differences and ratios are its value to the other's); `ablations`
holds every row of FlexiCache's mask form against the paper preset.
Intervals are 95 %, from a paired bootstrap over documents, pooled over tasks.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.methods import METHODS
from eval.report.bootstrap import LEVELS, Estimate
from eval.report.collect import collect
from eval.report.tables import interval, markdown, number, write_csv
from eval.settings import BUDGET_FREE

RESAMPLES = 5000
MASK_FORM = METHODS["flexicache-mask"].title
LONG = (  # tasks whose answers are long texts
    "gov_report_summ",
    "patent_summ",
    "paper_assistant",
    "review_summ",
    "gov_report",
    "multi_news",
)
NAME = re.compile(r"(.+?)(@\d+)?(-[0-9a-f]{8})?$")  # of a result file: method, budget, options
Row = dict[str, Any]


@dataclass
class Rows:
    """All fidelity rows of one method at one budget, by (suite, task, row)."""

    name: str
    label: str
    budget: int | None
    rows: dict[tuple[str, str, str], Row] = field(default_factory=dict)

    def on(self, tasks: Sequence[str] | None) -> Rows:
        kept = {key: row for key, row in self.rows.items() if tasks is None or key[1] in tasks}
        return replace(self, rows=kept)

    def mean(self, name: str) -> float:
        return float(np.mean([row[name] for row in self.rows.values()]))

    def accounting(self) -> Row:
        """Tokens per head and step; metadata and all device bytes in percent of dense KV."""
        tokens = [row["tokens"] for row in self.rows.values()]

        def mean(name: str) -> float:
            return float(np.mean([t[name] for t in tokens]))

        device = np.mean([t["resident"] / t["length"] + t["metadata"] for t in tokens])
        return {
            "attended": mean("attended"),
            "resident": mean("resident"),
            "moved": mean("moved"),
            "metadata %": 100 * mean("metadata"),
            "device %": 100 * float(device),
        }


def load(folders: Sequence[Path]) -> list[Rows]:
    found: dict[str, Rows] = {}
    for cell in collect(folders):
        name = NAME.match(cell.method)[1]
        budget = None if name in BUDGET_FREE else cell.budget
        rows = found.setdefault(cell.method, Rows(name, cell.label, budget))
        rows.rows |= {(cell.group, cell.task, key): row for key, row in cell.fidelity.items()}
    return sorted(found.values(), key=lambda rows: (rows.budget or 0, rows.label))


def paired(
    first: Rows, second: Rows, name: str, combine: Callable[[Any, Any], Any]
) -> tuple[Estimate, int]:
    """`combine` of the two means over shared rows, and the number of documents."""
    shared = [key for key in first.rows if key in second.rows]
    documents: dict[tuple[str, str, str], int] = {}
    for group, task, key in shared:
        place = (group, task, first.rows[group, task, key]["document_id"])
        documents.setdefault(place, len(documents))
    sums = np.zeros((3, len(documents)))
    for group, task, key in shared:
        row, other = first.rows[group, task, key], second.rows[group, task, key]
        sums[:, documents[group, task, row["document_id"]]] += row[name], other[name], 1
    count = len(documents)
    if not count:
        return Estimate(np.nan, np.nan, np.nan), 0
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    index = np.concatenate([np.arange(count)[None], drawn])
    left, right, rows = (values[index].sum(1) for values in sums)
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may have a KL of 0
        values = combine(left / rows, right / rows)
        low, high = np.percentile(values[1:], LEVELS)
    return Estimate(float(values[0]), float(low), float(high)), count


def targets(every: list[Rows], method: str, tasks: Sequence[str] | None) -> list[Row]:
    """All methods at each budget of `method`; ratio and differences are `method` to the other."""
    table = []
    for rows in (r.on(tasks) for r in every if r.label == method):
        for whole in (r for r in every if r.budget in (None, rows.budget)):
            shared = {key: row for key, row in whole.rows.items() if key in rows.rows}
            other = replace(whole, rows=shared)
            ratio, count = paired(rows, other, "top1", np.divide)
            if not count:
                continue
            kl, _ = paired(rows, other, "kl", np.subtract)
            top1, _ = paired(rows, other, "top1", np.subtract)
            table.append(
                {
                    "budget": rows.budget,
                    "method": other.label,
                    "documents": count,
                    **other.accounting(),
                    "KL": other.mean("kl"),
                    "top-1": other.mean("top1"),
                    "NLL": other.mean("nll"),
                    "KL difference": kl,
                    "top-1 difference": top1,
                    "top-1 ratio": ratio,
                }
            )
    return sorted(table, key=lambda row: (row["budget"], row["KL"]))


def ablations(every: list[Rows], tasks: Sequence[str] | None) -> list[Row]:
    """Every row of FlexiCache's mask form against the paper preset at its budget."""
    table: list[Row] = []
    kept: defaultdict[int | None, list[Rows]] = defaultdict(list)
    for rows in (r.on(tasks) for r in every if r.name == "flexicache-mask"):
        if rows.rows:
            kept[rows.budget].append(rows)
    for budget, group in kept.items():
        paper = next((r for r in group if r.label == f"{MASK_FORM} (paper)"), None)
        standard = next((r for r in group if r.label == MASK_FORM), None)
        if paper is None or standard is None:
            continue
        for rows in group:
            to_paper, count = paired(rows, paper, "kl", np.divide)
            to_default, _ = paired(rows, standard, "kl", np.divide)
            top1, _ = paired(rows, standard, "top1", np.subtract)
            table.append(
                {
                    "budget": budget,
                    "row": short(rows.label),
                    "documents": count,
                    **rows.accounting(),
                    "top-1": rows.mean("top1"),
                    "KL": rows.mean("kl"),
                    "KL / paper's": to_paper,
                    "KL / defaults'": to_default,
                    "top-1 - defaults'": top1,
                }
            )
        table.sort(key=lambda row: (row["budget"], row["KL / paper's"].value))
    return table


def short(label: str) -> str:
    """A label of the mask form without its name: the settings that are not the default's."""
    return label.removeprefix(MASK_FORM).strip(" ()").replace(") (", ", ") or "package defaults"


def show(table: list[Row]) -> str:
    if not table:
        return "nothing to compare\n"
    return markdown(list(table[0]), [[_cell(n, v) for n, v in row.items()] for row in table])


def _cell(name: str, value: Any) -> str:
    if isinstance(value, Estimate):
        return interval(value, 3)
    if isinstance(value, float):
        return number(value, 4 if name in ("KL", "NLL") else 3 if "top-1" in name else 1)
    return str(value)


def flat(table: list[Row]) -> list[Row]:
    """Estimates as three columns."""
    rows = []
    for row in table:
        rows.append({})
        for name, value in row.items():
            if isinstance(value, Estimate):
                rows[-1] |= {
                    name: value.value,
                    f"{name} low": value.low,
                    f"{name} high": value.high,
                }
            else:
                rows[-1][name] = value
    return rows


def plot(table: list[Row], path: Path) -> None:
    """KL over the paper preset's with its interval, one panel a budget."""
    from matplotlib.figure import Figure

    name = "KL / paper's"
    budgets = list(dict.fromkeys(row["budget"] for row in table))
    counts = [sum(row["budget"] == budget for row in table) for budget in budgets]
    figure = Figure(figsize=(9, 1 + 0.19 * sum(counts)), layout="constrained")
    panels = figure.subplots(
        len(budgets), 1, sharex=True, squeeze=False, height_ratios=[count + 2 for count in counts]
    )
    for axes, budget in zip(panels[:, 0], budgets):
        rows = [row for row in table if row["budget"] == budget][::-1]
        middle = [row[name].value for row in rows]
        spans = [
            [row[name].value - row[name].low for row in rows],
            [row[name].high - row[name].value for row in rows],
        ]
        labels = [f"{row['row']} ({row['metadata %']:.1f} %)" for row in rows]
        axes.errorbar(middle, labels, xerr=spans, fmt="o", markersize=4, capsize=2, linewidth=1.2)
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.axvline(1, color="0.6", linewidth=0.8)
        axes.axvline(0.6, color="0.6", linewidth=0.8, linestyle="--")
        axes.set_xscale("log")
        axes.set_xticks([0.1, 0.2, 0.4, 0.6, 1, 2, 4], ["0.1", "0.2", "0.4", "0.6", "1", "2", "4"])
        axes.minorticks_off()
        axes.tick_params(labelsize=7)
        axes.set_title(f"budget {budget} (metadata bytes in % of dense KV)", fontsize=9)
    panels[-1, 0].set_xlabel("KL over the paper preset's KL")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("targets", "ablations"))
    parser.add_argument("results", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--method", default=MASK_FORM, help="label, for targets")
    parser.add_argument("--tasks", help="names with commas, or `long`: those with long answers")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path, help="ablations: PNG of KL over the paper preset's")
    args = parser.parse_args()
    tasks = LONG if args.tasks == "long" else args.tasks.split(",") if args.tasks else None
    every = load(args.results)
    found = (
        targets(every, args.method, tasks) if args.what == "targets" else ablations(every, tasks)
    )
    print(show(found))
    if args.csv:
        write_csv(flat(found), args.csv)
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
