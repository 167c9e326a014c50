"""The model card that is uploaded with a head profile."""

from __future__ import annotations

from pathlib import Path

from .plots import overlap_plot, stability_map
from .profile import FILE_NAME, HeadProfile
from .stability import task_overlap

PAPER = "https://arxiv.org/abs/2511.00868"


def write_card(profile: HeadProfile, repo_id: str, folder: Path) -> Path:
    """Write `README.md` and its plots into `folder`; returns the card's path."""
    parts = [_front_matter(profile), _opening(profile, repo_id), facts_table(profile)]
    if profile.stability is not None:
        stability_map(profile.stability, profile.unstable_heads, folder / "stability.png")
        parts.append("## Stability\n\n![Stability of every KV head](stability.png)")
    parts.append(f"## Unstable heads\n\n{heads_table(profile)}")
    if len(profile.task_heads) > 1:
        result = task_overlap(profile.task_heads, profile.num_heads)
        overlap_plot(result, folder / "overlap.png")
        parts.append(
            "## Overlap between tasks\n\nShare of unstable heads that two tasks have in common; "
            f"off-diagonal mean {result.mean:.3f}, chance {result.chance:.2f}.\n\n"
            f"{overlap_table(profile)}\n\n![Overlap between tasks](overlap.png)"
        )
    path = folder / "README.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def facts_table(profile: HeadProfile) -> str:
    """How the profile was made, as a markdown table."""
    total = profile.num_layers * profile.num_kv_heads
    rows = {
        "model": profile.model_id,
        "model revision": profile.revision,
        "layers x KV heads x head dimension": " x ".join(
            str(value or "?")
            for value in (profile.num_layers, profile.num_kv_heads, profile.head_dim)
        ),
        "unstable heads (M)": f"{len(profile.unstable_heads)} of {total}",
        "tasks": ", ".join(profile.tasks) or None,
        "pages selected (K)": profile.top_k_pages,
        "page size": profile.page_size and f"{profile.page_size} tokens",
        "window (W)": profile.window and f"{profile.window} decode steps",
        "windows that voted": profile.num_windows,
        **{k.replace("_", " "): v for k, v in profile.provenance.items() if v is not None},
        "made with": profile.tool_version,
    }
    return _table(["", ""], [[key, str(value)] for key, value in rows.items() if value is not None])


def heads_table(profile: HeadProfile) -> str:
    """The unstable KV heads of every layer that has any."""
    rows = [
        [str(layer), ", ".join(map(str, heads))]
        for layer in range(profile.num_layers)
        if (heads := profile.unstable_in(layer))
    ]
    return _table(["layer", "unstable KV heads"], rows)


def overlap_table(profile: HeadProfile) -> str:
    """Overlap of every two tasks' unstable heads."""
    result = task_overlap(profile.task_heads, profile.num_heads)
    rows = [
        [task, *("" if i == j else f"{value:.2f}" for j, value in enumerate(row))]
        for i, (task, row) in enumerate(zip(result.tasks, result.matrix))
    ]
    return _table(["", *result.tasks], rows)


def _front_matter(profile: HeadProfile) -> str:
    lines = ["---", "tags:", "- flexicache", "- kv-cache", "- head-profile"]
    if profile.model_id and profile.model_id.count("/") == 1:
        lines.append(f"base_model: {profile.model_id}")
    return "\n".join([*lines, "---"])


def _opening(profile: HeadProfile, repo_id: str) -> str:
    model = profile.model_id or "a language model"
    return (
        f"# Head profile of {model}\n\n"
        f"Which KV heads keep attending to the same pages while decoding, and which do not: the "
        f"input of the FlexiCache KV cache ([paper]({PAPER})). `{FILE_NAME}` is plain JSON; no "
        "code is run to load it, and it is checked against the model.\n\n"
        "```python\n"
        "from flexicache_hf import FlexiCacheDynamicCache, HeadProfile\n\n"
        f'profile = HeadProfile.from_pretrained("{repo_id}")\n'
        "cache = FlexiCacheDynamicCache(model, profile)\n"
        "```"
    )


def _table(header: list[str], rows: list[list[str]]) -> str:
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells)
