"""The paper's accuracy tables for one of its models, published numbers beside ours.

    python scripts/paper_tables.py --model llama-3.1-8b --suite leval --heads HEADS.json --out DIR

HEADS.json is the authors' list of unstable heads (`model_unstable_heads_data.json`). With --profile
own profiles are used instead; `{task}` and `{budget}` in the path stand for each. `--dry-run` goes
through everything with a tiny stand-in of the model's type and invented rows. Run it again to go on
where it stopped; start it with `accelerate launch --multi_gpu` to use several GPUs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.dry import SCALE, dry_settings
from eval.paper import MODELS, SUITES, run_table, table, write_profiles
from eval.settings import Settings


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, choices=MODELS)
    parser.add_argument("--suite", required=True, choices=SUITES)
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--heads", metavar="FILE", help="unstable heads in the authors' format")
    parser.add_argument("--profile", metavar="PATH", help="may hold {task} and {budget}")
    parser.add_argument("--data", metavar="DIR", help="the suite's own files (default: the Hub)")
    parser.add_argument("--prompts", metavar="FILE", help="LongBench's dataset2prompt.json")
    parser.add_argument("--tasks", help="some of the paper's tasks, with commas")
    parser.add_argument("--limit", type=int, help="rows per task")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--device", help="auto: one model over all accelerators")
    args = parser.parse_args(argv)

    model, (tasks, rows) = MODELS[args.model], SUITES[args.suite]
    settings = Settings(
        model=model.repository,
        suite=args.suite,
        tasks=tuple(args.tasks.split(",")) if args.tasks else tasks,
        methods=("dense",),
        budgets=(1024,),
        out=args.out,
        limit=args.limit,
        context=128_000 if args.suite == "leval" else None,
        batch_size=args.batch_size,
        data=args.data,
        prompts=args.prompts,
        profile=args.profile,
        device=args.device,
    )
    if args.dry_run:
        rows = tuple((label, method, budget // SCALE) for label, method, budget in rows)
        settings = dry_settings(model, settings, sorted({budget for *_, budget in rows}))
    elif args.heads:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model.repository)
        budgets = sorted({budget for *_, budget in rows})
        folder = Path(args.out) / "profiles"
        pattern = write_profiles(model, config, args.heads, settings.tasks, budgets, folder)
        settings = replace(settings, profile=pattern)
    elif not args.profile:
        parser.error("give --heads or --profile: the paper's rows need a head profile")
    run_table(settings, rows)
    print(table(args.model, settings, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
