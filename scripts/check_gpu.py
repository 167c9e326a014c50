"""Everything that only a GPU can show, in one run of less than ten minutes, without downloads.

    python scripts/check_gpu.py --out found.jsonl
    python scripts/check_gpu.py --device cpu --sizes tiny      # tests the script itself

Where the package is not installed, put PYTHONPATH=src before it; it needs only torch and
transformers. One JSON line per check and a table at the end; a failing check does not stop the
others. The exit status is 1 if any failed. The model has Llama-3.1-8B's shapes and random weights
(16 GB; with its caches about 60 GB; less with --layers). The embedded SmolLM2 is used if it is
there already.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_correctness as correct
import gpu_measures as measure
import torch
import transformers
from gpu_setup import Bench, CheckFailed, Facts, Sizes

from flexicache_hf import FlexiCacheWarning

Check = tuple[str, Callable[[Bench], Facts]]


def versions(bench: Bench) -> Facts:
    """What this runs on."""
    facts: Facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": str(bench.device),
    }
    if bench.cuda:
        found = torch.cuda.get_device_properties(bench.device)
        facts |= {"gpu": found.name, "memory": found.total_memory, "cuda": torch.version.cuda}
    return facts


def checks(sizes: Sizes) -> list[Check]:
    """The quick and telling ones first, so that a cut run has said the most."""
    halves = (torch.float16, torch.bfloat16)
    listed: list[Check] = [("versions", versions)]
    for dtype in (torch.float32, *halves):
        name = str(dtype).removeprefix("torch.")
        listed.append((f"exact {name}", partial(correct.exactness, dtype=dtype)))
    listed += [
        ("sparse steps against the CPU", correct.sparse_against_cpu),
        ("transfers float32", partial(correct.transfers, dtype=torch.float32)),
        ("transfers bfloat16", partial(correct.transfers, dtype=torch.bfloat16)),
        ("a missing wait is caught", correct.late_queue_catches),
        ("host pages are pinned", correct.pinned_pages),
        ("transfer bandwidth", measure.bandwidth),
        ("transfer overlap", measure.overlap),
        ("embedded model", correct.real_model),
        ("reported bytes", measure.reported_bytes),
        ("prefill peak", measure.prefill_peak),
        ("ranking cost", measure.ranking_cost),
    ]
    for context in sizes.contexts:
        for batch in sizes.batches:
            speed = partial(measure.decode_speed, context=context, batch=batch)
            listed.append((f"decode speed {context} x {batch}", speed))
    return listed


def run(check: Check, bench: Bench) -> dict[str, Any]:
    """One check's line; whatever it raises is part of it."""
    name, work = check
    begin = time.monotonic()
    line: dict[str, Any] = {"check": name, "ok": True}
    try:
        facts = work(bench)
    except CheckFailed as failed:
        line |= {"ok": False, "error": str(failed)}
        facts = failed.facts
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        line |= {"ok": False, "error": f"{type(error).__name__} at {where}: {error}"[:2000]}
        facts = {}
        traceback.print_exc()
    return line | {"seconds": round(time.monotonic() - begin, 2)} | facts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", choices=("full", "tiny"), default="full")
    parser.add_argument("--layers", type=int, help="of the measured model; default 32")
    parser.add_argument("--only", nargs="+", help="checks whose names contain one of these words")
    parser.add_argument(
        "--limit", type=float, default=540, help="seconds; later checks are not run"
    )
    parser.add_argument("--out", type=Path, help="write the JSON lines here too")
    args = parser.parse_args(argv)

    begin = time.monotonic()
    warnings.simplefilter("ignore", FlexiCacheWarning)
    sizes = Sizes() if args.sizes == "full" else Sizes.tiny()
    if args.layers is not None:
        sizes = replace(sizes, layers=args.layers)
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    bench = Bench(device, sizes)
    chosen = [
        each
        for each in checks(sizes)
        if not args.only or any(word in each[0] for word in args.only)
    ]
    lines = []
    for check in chosen:
        if time.monotonic() - begin > args.limit:
            line = {
                "check": check[0],
                "ok": False,
                "error": f"not run: {args.limit:.0f} s are over",
            }
        else:
            line = run(check, bench)
        lines.append(line)
        print(json.dumps(line), flush=True)
        if args.out is not None:
            args.out.write_text("".join(json.dumps(each) + "\n" for each in lines))
        if "not run" not in line.get("error", ""):
            release(bench)
    print(table(lines), flush=True)
    return 0 if lines and all(line["ok"] for line in lines) else 1


def release(bench: Bench) -> None:
    """Free what a check left; after a fatal CUDA error that fails too, and must not end the run."""
    try:
        bench.collect()
    except RuntimeError as error:
        print(f"could not free memory: {error}"[:300], file=sys.stderr)


def table(lines: list[dict[str, Any]]) -> str:
    width = max((len(line["check"]) for line in lines), default=0)
    rows = [
        f"{line['check']:<{width}}  {'ok' if line['ok'] else 'FAILED':<6}  "
        f"{line.get('seconds', 0):>7.1f} s  {line.get('error') or line.get('skipped', '')}"
        for line in lines
    ]
    failed = sum(not line["ok"] for line in lines)
    return "\n".join([*rows, f"{len(lines) - failed} passed, {failed} failed"])


if __name__ == "__main__":
    raise SystemExit(main())
