"""Plots of head stability. Colours are ordered in lightness, so they survive colour blindness and
grey printing; unstable heads are also marked by shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .stability import Heads, TaskOverlap

MAP = "cividis"


def stability_map(stability: Sequence[Sequence[float | None]], unstable: Heads, path: Path) -> Path:
    """Heat map layers x KV heads; unstable heads carry a dot. `stability` is `[L][H_kv]`."""
    values = [[float("nan") if v is None else v for v in row] for row in stability]
    layers, heads = len(values), len(values[0])
    figure, axes = _figure(max(6.4, 0.24 * layers + 1.6), max(1.9, 0.26 * heads + 1.3))
    columns = [list(column) for column in zip(*values)]
    image = axes.imshow(columns, cmap=MAP, aspect="auto", **_range(values))
    if unstable:
        x, y = zip(*unstable)
        axes.scatter(x, y, s=26, c="white", edgecolors="black", linewidths=0.8, label="unstable")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, borderpad=0.1)
    axes.set_xlabel("layer")
    axes.set_ylabel("KV head")
    axes.set_xticks(range(0, layers, 1 if layers <= 32 else 4))
    axes.set_yticks(range(heads))
    axes.tick_params(labelsize=8)
    axes.set_title("Stability (mean RCO)", loc="left")
    figure.colorbar(image, ax=axes, pad=0.015)
    return _save(figure, path)


def offset_plot(curves: Any, unstable: Heads, path: Path) -> Path:
    """RCO against offset, a line per head and the two groups' means. `curves`: `[W-1, L, H_kv]`."""
    figure, axes = _figure(6.4, 4.0)
    offsets = range(1, len(curves) + 1)
    chosen = set(unstable)
    groups: dict[bool, list[list[float]]] = {False: [], True: []}
    for layer in range(curves.shape[1]):
        for head in range(curves.shape[2]):
            line = curves[:, layer, head].tolist()
            if line[0] == line[0]:  # not NaN: a measured head
                groups[(layer, head) in chosen].append(line)
    for is_unstable, colour, dash, name in (
        (False, "#00204d", "-", "stable"),
        (True, "#d98c00", "--", "unstable"),
    ):
        lines = groups[is_unstable]
        for line in lines:
            axes.plot(offsets, line, dash, color=colour, alpha=0.3, linewidth=0.8)
        if lines:
            mean = [sum(values) / len(values) for values in zip(*lines)]
            label = f"mean of {len(lines)} {name} heads"
            axes.plot(offsets, mean, dash, color=colour, linewidth=2.8, label=label)
    axes.set_xlabel("decode steps after the reference step")
    axes.set_ylabel("RCO (0 = chance, 1 = same pages)")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(frameon=True, framealpha=0.9)
    return _save(figure, path)


def overlap_plot(result: TaskOverlap, path: Path) -> Path:
    """Overlap of the tasks' unstable sets; the diagonal is left blank."""
    count = len(result.tasks)
    side = max(3.6, 0.62 * count + 2.2)
    figure, axes = _figure(side + 0.6, side)
    values = [
        [float("nan") if i == j else value for j, value in enumerate(row)]
        for i, row in enumerate(result.matrix)
    ]
    image = axes.imshow(values, cmap=MAP, vmin=result.chance, vmax=1)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if i != j:
                bright = (value - result.chance) / (1 - result.chance) > 0.55
                colour = "black" if bright else "white"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(count), result.tasks, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(count), result.tasks, fontsize=8)
    axes.set_title(
        f"Overlap of unstable heads: mean {result.mean:.3f}, chance {result.chance:.2f}",
        loc="left",
        fontsize=9,
    )
    figure.colorbar(image, ax=axes, pad=0.02, shrink=0.8)
    return _save(figure, path)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'flexicache_hf[eval]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _range(values: Sequence[Sequence[float]]) -> dict[str, float]:
    """Colour range on tenths around the values, so that differences stay visible."""
    found = [v for row in values for v in row if v == v] or [0.0, 1.0]
    return {"vmin": math.floor(min(found) * 10) / 10, "vmax": math.ceil(max(found) * 10) / 10}
