"""Curves against the budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from eval.report.bootstrap import Estimate
from eval.report.collect import DENSE
from eval.report.tables import Group


def curves(group: Group, folder: Path) -> list[Path]:
    """Retention and KL against the budget, one line a method; plots without data are left out."""
    drawn = [
        _plot(
            group, group.retention, "retention (method / dense)", folder / _name(group, "retention")
        ),
        _plot(
            group,
            lambda method: group.mean_of(method, "kl"),
            "teacher-forced KL to dense (nats)",
            folder / _name(group, "kl"),
            log=True,
        ),
    ]
    return [path for path in drawn if path]


def _name(group: Group, what: str) -> str:
    return f"{group.name}-{what}.png"


def _plot(
    group: Group, measure: Callable[[str], Estimate], title: str, path: Path, *, log: bool = False
) -> Path | None:
    from matplotlib.figure import Figure

    lines: dict[str, list[tuple[int, Estimate]]] = defaultdict(list)
    for method in group.methods:
        cell, estimate = group.of(method)[0], measure(method)
        if method != DENSE and cell.budget and estimate.value == estimate.value:
            lines[cell.label].append((cell.budget, estimate))
    if not lines:
        return None
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for index, (label, points) in enumerate(lines.items()):
        points.sort()
        budgets = [budget for budget, _ in points]
        values = [estimate.value for _, estimate in points]
        below = [max(0.0, e.value - e.low) for _, e in points]
        above = [max(0.0, e.high - e.value) for _, e in points]
        style = {"marker": "osD^vPX"[index % 7], "capsize": 2, "linewidth": 1.2, "markersize": 4}
        axes.errorbar(budgets, values, [below, above], label=label, **style)
    ticks = sorted({budget for points in lines.values() for budget, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    if log:
        axes.set_yscale("log")
    else:
        axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set_xlabel("budget (tokens per head)")
    axes.set_ylabel(title)
    axes.set_title(group.name)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)
    return path
