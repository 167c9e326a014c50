"""Curves against the budget, and against what is really attended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from eval.report.bootstrap import Estimate
from eval.report.collect import DENSE
from eval.report.tables import Group

MARKERS = "osD^vPX"
Points = list[tuple[float, Estimate]]


def curves(group: Group, folder: Path) -> list[Path]:
    """Retention and KL, one line a method; plots without data are left out."""

    def kl(method: str) -> Estimate:
        return group.mean_of(method, "kl")

    def budget(method: str) -> float | None:
        return group.of(method)[0].budget

    def attended(method: str) -> float | None:
        return group.tokens(method).get("attended")

    retention_title, kl_title = "retention (method / dense)", "teacher-forced KL to dense (nats)"
    budget_title, attended_title = "budget (tokens per head)", "attended tokens per head and step"
    path = folder / group.name
    drawn = [
        _plot(
            group, budget, group.retention, budget_title, retention_title, f"{path}-retention.png"
        ),
        _plot(group, budget, kl, budget_title, kl_title, f"{path}-kl.png"),
        _plot(group, attended, kl, attended_title, kl_title, f"{path}-kl-attended.png"),
    ]
    return [path for path in drawn if path]


def _plot(
    group: Group,
    place: Callable[[str], float | None],
    measure: Callable[[str], Estimate],
    x_title: str,
    y_title: str,
    path: str,
) -> Path | None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    lines: dict[str, Points] = defaultdict(list)
    for method in group.methods:
        x, estimate = place(method), measure(method)
        if method != DENSE and x and estimate.value == estimate.value:
            lines[group.of(method)[0].label].append((x, estimate))
    if not lines:
        return None
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_prop_cycle(color=colormaps["tab20"].colors)
    for index, (label, points) in enumerate(lines.items()):
        points.sort()
        xs, values = zip(*((x, estimate.value) for x, estimate in points))
        below = [max(0.0, e.value - e.low) for _, e in points]
        above = [max(0.0, e.high - e.value) for _, e in points]
        width = 2.2 if label.startswith("FlexiCache") else 1.2
        line = axes.errorbar(xs, values, [below, above], label=label, capsize=2, linewidth=width)
        line[0].set(marker=MARKERS[index % len(MARKERS)], markersize=4)
    axes.set_xscale("log", base=2)
    ticks = sorted({x for points in lines.values() for x, _ in points})
    if x_title.startswith("budget"):
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    else:
        axes.xaxis.set_major_formatter("{x:g}")
    if "KL" in y_title:
        axes.set_yscale("log")
    else:
        axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set_xlabel(x_title)
    axes.set_ylabel(y_title)
    axes.set_title(group.name)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)
    return Path(path)
