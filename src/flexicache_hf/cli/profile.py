"""`flexicache profile collect | analyse | show | push | import`.

Several processes: `accelerate launch -m flexicache_hf.cli.profile collect ...` splits the documents
over them; the records of all processes lie in one folder, and `analyse` reads that.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..profiles.analysis import Analysis
    from ..profiles.collect import Progress
    from ..profiles.texts import Text


def add_parser(subparsers: Any) -> None:
    """Add `profile` and its subcommands; each sets `run`, a function from the parsed arguments to
    an exit code."""
    parser = subparsers.add_parser("profile", help="make, look at and share head profiles")
    add_commands(parser.add_subparsers(required=True, metavar="COMMAND"))


def add_commands(commands: Any) -> None:
    """Add the subcommands themselves."""
    _add_collect(commands)
    _add_analyse(commands)
    show = commands.add_parser("show", help="print a profile")
    show.add_argument("source", help="directory, file, Hub repository, or a model with a profile")
    show.add_argument("--revision", help="of the Hub repository")
    show.add_argument("--json", action="store_true", help="print the document itself")
    show.set_defaults(run=run_show)
    push = commands.add_parser("push", help="upload a profile with a model card")
    push.add_argument("source", help="directory or file of the profile")
    push.add_argument("repo_id", help="OWNER/NAME on the Hub; made if it does not exist")
    push.add_argument("--private", action="store_true", default=None)
    push.add_argument("--revision", help="branch to commit to")
    push.set_defaults(run=run_push)
    imported = commands.add_parser("import", help="read a list published by the paper's authors")
    imported.add_argument("file", type=Path)
    imported.add_argument("--model-id", required=True, help="the model's key in the file")
    imported.add_argument("--config", help="model directory or id to read the config from")
    imported.add_argument("--task", default="gov_report")
    imported.add_argument("--top-k", type=int, default=64, metavar="K", help="pages")
    imported.add_argument("--out", type=Path, required=True, help="directory for the profile")
    imported.set_defaults(run=run_import)


def _add_collect(commands: Any) -> None:
    parser = commands.add_parser("collect", help="record the pages of dense generations")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records; resumable")
    parser.add_argument("--model", help="id or directory; default: the embedded SmolLM2-135M")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    texts = parser.add_argument_group("texts")
    texts.add_argument("--leval", nargs="+", default=[], metavar="TASK")
    texts.add_argument("--longbench", nargs="+", default=[], metavar="TASK")
    texts.add_argument("--data", type=Path, help="folder with leval/ and longbench/")
    texts.add_argument("--dataset", help="name of a dataset, loaded with `datasets`")
    texts.add_argument("--dataset-config")
    texts.add_argument("--split", default="train")
    texts.add_argument("--text-column", default="text")
    texts.add_argument("--prompts", nargs="+", default=[], type=Path, help=".jsonl or text files")
    texts.add_argument("--documents", type=int, default=2, help="of every task (default: 2)")
    texts.add_argument("--skip", type=int, default=0, help="documents to pass over in every task")
    texts.add_argument("--min-tokens", type=int, default=0, help="pass over shorter documents")
    record = parser.add_argument_group("what is recorded")
    record.add_argument("--steps", type=int, default=256, help="decode steps (default: 256)")
    record.add_argument("--top-k", type=int, default=64, metavar="K", help="largest K, in pages")
    record.add_argument("--page-sizes", type=int, nargs="+", default=[16], metavar="TOKENS")
    record.add_argument("--max-prompt-tokens", type=int, default=4096)
    parser.set_defaults(run=run_collect)


def _add_analyse(commands: Any) -> None:
    parser = commands.add_parser("analyse", help="make a profile of records")
    parser.add_argument("records", type=Path, help="folder that `collect` wrote")
    parser.add_argument("--out", type=Path, required=True, help="profile, plots and report.md")
    parser.add_argument("--top-k", type=int, default=64, metavar="K", help="K of the profile")
    parser.add_argument("--compare", type=int, nargs="*", default=[], metavar="K", help="other Ks")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--window", type=int, default=16, help="W, decode steps")
    parser.add_argument("--unstable-fraction", type=float, default=0.25)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=run_analyse)


def run_collect(args: argparse.Namespace) -> int:
    from ..profiles.collect import collect
    from ..profiles.records import CollectSettings
    from ..profiles.texts import dataset, leval, longbench, own_prompts, select

    share, device = _process(args.device)
    model, tokenizer = _load(args.model, args.dtype, device)
    sources: list[Any] = [own_prompts(args.prompts)]
    if args.leval or args.longbench:
        folder = _data(args.data)
        sources += [
            leval(folder / "leval", args.leval),
            longbench(folder / "longbench", args.longbench),
        ]
    if args.dataset:
        needed = None if args.min_tokens else args.skip + args.documents
        rows = dataset(args.dataset, args.split, args.text_column, args.dataset_config)
        sources.append(rows if needed is None else (text for text, _ in zip(rows, range(needed))))
    texts = select(
        chain(*sources),
        tokenizer,
        args.documents,
        skip=args.skip,
        min_tokens=args.min_tokens,
    )
    if not texts:
        raise ValueError(
            "no text to generate about; give --leval, --longbench, --dataset or --prompts, and "
            "check --skip and --min-tokens"
        )
    settings = CollectSettings(
        args.top_k, tuple(args.page_sizes), args.steps, args.max_prompt_tokens
    )
    begin = time.monotonic()

    def report(progress: Progress, text: Text) -> None:
        made = progress.done - progress.skipped
        left = (time.monotonic() - begin) / max(made, 1) * (progress.total - progress.done)
        known = " (had a record)" if made == 0 else f", about {left / 60:.0f} min left"
        line = f"{progress.done}/{progress.total} {text.task}/{text.name}{known}"
        print(f"[{share[0]}] {line}" if share[1] > 1 else line, file=sys.stderr, flush=True)

    collect(model, tokenizer, texts, args.out, settings, share=share, report=report)
    return 0


def run_analyse(args: argparse.Namespace) -> int:
    from ..profiles.analysis import analyse, load_records
    from ..profiles.plots import offset_plot, overlap_plot, stability_map

    records = load_records(args.records)
    options = {
        "page_size": args.page_size,
        "window": args.window,
        "unstable_fraction": args.unstable_fraction,
    }
    results = {k: analyse(records, top_k=k, **options) for k in {*args.compare, args.top_k}}
    chosen = results[args.top_k]
    profile = chosen.profile
    path = profile.save_pretrained(args.out)
    if profile.stability is not None:
        stability_map(profile.stability, profile.unstable_heads, args.out / "stability.png")
    offset_plot(chosen.curves, profile.unstable_heads, args.out / "offsets.png")
    if chosen.overlap is not None:
        overlap_plot(chosen.overlap, args.out / "overlap.png")
    report = _report(dict(sorted(results.items())), args.top_k)
    (args.out / "report.md").write_text(report, encoding="utf-8")
    if args.json:
        print(json.dumps({k: _figures(result) for k, result in sorted(results.items())}, indent=1))
    else:
        print(f"{report}\nprofile: {path}")
    return 0


def run_show(args: argparse.Namespace) -> int:
    from ..profiles.card import facts_table, heads_table
    from ..profiles.profile import HeadProfile

    found = None
    if args.revision is None and not Path(args.source).exists():
        found = HeadProfile.for_model(args.source, hub=False)  # a bundled one, without the network
    profile = found or HeadProfile.from_pretrained(args.source, revision=args.revision)
    if args.json:
        print(profile.to_json(), end="")
    else:
        print(f"{facts_table(profile)}\n\n{heads_table(profile)}")
    return 0


def run_push(args: argparse.Namespace) -> int:
    from ..profiles.profile import HeadProfile

    profile = HeadProfile.from_pretrained(args.source)
    print(profile.push_to_hub(args.repo_id, private=args.private, revision=args.revision))
    return 0


def run_import(args: argparse.Namespace) -> int:
    from transformers import AutoConfig

    from ..profiles.published_lists import import_reference_list

    config = AutoConfig.from_pretrained(args.config or args.model_id)
    profile = import_reference_list(
        args.file, config, model_id=args.model_id, task=args.task, top_k_pages=args.top_k
    )
    print(profile.save_pretrained(args.out))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m flexicache_hf.cli.profile`, which `accelerate launch -m` needs."""
    parser = argparse.ArgumentParser(prog="flexicache profile")
    add_commands(parser.add_subparsers(required=True, metavar="COMMAND"))
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except (ValueError, OSError, ImportError) as error:
        print(f"flexicache profile: {error}", file=sys.stderr)
        return 1


def _figures(result: Analysis) -> dict[str, Any]:
    documents = result.between_documents
    return {
        "windows": result.profile.num_windows,
        "documents": result.documents,
        "unstable_heads": len(result.profile.unstable_heads),
        "chance": result.between_windows.chance,
        "task_overlap": None if result.overlap is None else result.overlap.mean,
        "recall_between_windows": result.between_windows.recall,
        "agreement_between_windows": result.between_windows.agreement,
        "recall_between_documents": None if documents is None else documents.recall,
        "agreement_between_documents": None if documents is None else documents.agreement,
    }


def _report(results: dict[int, Analysis], top_k: int) -> str:
    from ..profiles.card import facts_table, heads_table, overlap_table

    chosen = results[top_k]
    columns = {
        "task_overlap": "overlap of tasks (off-diagonal mean)",
        "agreement_between_documents": "agreement, halves by document",
        "recall_between_documents": "recall@M, halves by document",
        "agreement_between_windows": "agreement, halves by window",
        "recall_between_windows": "recall@M, halves by window",
        "chance": "chance",
        "windows": "windows",
    }
    rows = [["K", *columns.values()], ["---"] * (len(columns) + 1)]
    for k, result in results.items():
        figures = _figures(result)
        values = [figures[name] for name in columns]
        shown = [
            f"{v:.3f}" if isinstance(v, float) else "" if v is None else str(v) for v in values
        ]
        rows.append([str(k), *shown])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    parts = [facts_table(chosen.profile), table]
    if chosen.overlap is not None:
        parts.append(f"Overlap of tasks at K = {top_k}:\n\n{overlap_table(chosen.profile)}")
    parts.append(heads_table(chosen.profile))
    return "\n\n".join(parts) + "\n"


def _process(device: str | None) -> tuple[tuple[int, int], str]:
    """`((index, count), device)` of this process, as `accelerate launch` set it up."""
    import torch

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
        return (state.process_index, state.num_processes), device or str(state.device)
    return (0, 1), device or ("cuda" if torch.cuda.is_available() else "cpu")


def _load(name: str | None, dtype: str, device: str) -> tuple[Any, Any]:
    if name is None:
        from ..models.embedded import load_model

        model, tokenizer = load_model(**({} if dtype == "auto" else {"dtype": dtype}))
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(name)
    return model.to(device), tokenizer


def _data(given: Path | None) -> Path:
    from ..profiles.texts import data_dir

    folder = given or data_dir()
    if folder is None or not folder.is_dir():
        raise FileNotFoundError(
            f"no data at {folder or '$FLEXICACHE_DATA'}; pass --data with the folder that holds "
            "leval/ and longbench/"
        )
    return folder


if __name__ == "__main__":
    sys.exit(main())
