"""Do the profile's heads matter? Teacher-forced KL to dense with four choices of unstable heads.

The dense model continues each held-out document greedily; every choice is fed the same tokens, and
its next-token distributions are compared step by step. All choices have the same budget and (but
for `none`) the same number of unstable heads, and follow the paper's rules (the `paper` preset):

    profile      the heads the profile names
    random       as many at random, the mean of `--draws` draws, other ones for every document
    most_stable  as many from the other end of the profile's ranking
    none         no unstable head

    python scripts/check_profile.py --out results.jsonl --leval gov_report_summ patent_summ --skip 6

All choices of a document are decoded in one batch, with the selection as masks (page_masks.py).
`--cache N` measures the first N documents again through FlexiCacheDynamicCache itself; the report
then says how far the two differ. Rows already in the file are not measured again; `--report` only
prints the tables.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from page_masks import Variant, compare_variants

from flexicache_hf import FlexiCacheConfig, FlexiCacheDynamicCache, HeadProfile
from flexicache_hf.models.embedded import load_model
from flexicache_hf.models.versions import cache_argument
from flexicache_hf.profiles.texts import data_dir, leval, prompt_ids, select


def choices(profile: HeadProfile, draws: int, seed: str) -> dict[str, list[tuple[int, int]]]:
    """Name of a choice -> its unstable heads."""
    ranked = list(profile.ranked_heads())
    count = len(profile.unstable_heads)
    result = {"none": [], "most_stable": ranked[-count:], "profile": list(profile.unstable_heads)}
    rng = random.Random(seed)
    for draw in range(draws):
        result[f"random.{draw}"] = rng.sample(sorted(ranked), count)
    return result


@torch.no_grad()
def forward(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Log-probabilities `[V]` after feeding `ids` `[1, q]`."""
    logits = model(ids, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1).logits
    return logits[0, -1].float().log_softmax(-1)


def dense_run(model: Any, prompt: torch.Tensor, steps: int) -> tuple[torch.Tensor, list[Any]]:
    """The dense model's own greedy continuation `[steps]` and its log-probabilities at each."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    seen = [forward(model, prompt, cache)]
    tokens = []
    for _ in range(steps):
        tokens.append(int(seen[-1].argmax()))
        seen.append(forward(model, torch.tensor([tokens[-1:]]), cache))
    return torch.tensor(tokens), seen[1:]  # the prefill is dense for everybody


def compare(
    model: Any, cache: Any, prompt: torch.Tensor, tokens: torch.Tensor, dense: list[Any]
) -> tuple[float, float]:
    """Mean KL(dense || cache) in nats and top-1 agreement over the steps."""
    forward(model, prompt, cache)
    kl, agreed = 0.0, 0
    for token, expected in zip(tokens, dense, strict=True):
        found = forward(model, token.view(1, 1), cache)
        kl += float((expected.exp() * (expected - found)).sum())
        agreed += int(expected.argmax() == found.argmax())
    return kl / len(dense), agreed / len(dense)


def measure(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model()
    profile = HeadProfile.from_pretrained(args.profile) if args.profile else None
    profile = profile or HeadProfile.for_model(model)
    if profile is None:
        sys.exit("no profile for this model: pass --profile")
    folder = args.data or data_dir()
    texts = select(
        leval(folder / "leval", args.leval), tokenizer, args.documents,
        skip=args.skip, min_tokens=args.prompt_tokens,
    )  # fmt: skip
    done = {key(row) for row in rows(args.out)}
    for count, text in enumerate(texts):
        document = f"{text.task}/{text.name}"
        ids = prompt_ids(tokenizer, text, args.prompt_tokens)
        prompt = torch.tensor([ids])
        heads = choices(profile, args.draws, document)
        facts = {"document": document, "prompt_tokens": len(ids), "steps": args.steps}
        wanted = [
            {**facts, "budget": budget, "set": name, "through": "masks"}
            for budget in args.budgets
            for name in heads
        ]
        todo = [row for row in wanted if key(row) not in done]
        if todo:
            variants = [Variant(frozenset(heads[row["set"]]), row["budget"] // 16) for row in todo]
            found = compare_variants(model, prompt, variants, args.steps)
            save(args.out, todo, found)
        todo = [row for row in ({**w, "through": "cache"} for w in wanted) if key(row) not in done]
        if todo and count < args.cache:
            tokens, dense = dense_run(model, prompt, args.steps)
            for row in todo:
                cache = FlexiCacheDynamicCache(
                    model,
                    HeadProfile.from_unstable_heads(model.config, heads[row["set"]]),
                    config=FlexiCacheConfig.paper(token_budget=row["budget"]),
                )
                save(args.out, [row], [compare(model, cache, prompt, tokens, dense)])
        print(f"{count + 1}/{len(texts)} {document}", file=sys.stderr, flush=True)


def save(path: Path, measured: list[dict[str, Any]], found: list[tuple[float, float]]) -> None:
    with path.open("a") as file:
        for row, (kl, top1) in zip(measured, found, strict=True):
            file.write(json.dumps({**row, "kl": kl, "top1": top1}) + "\n")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["document"], row["budget"], row["set"], row["through"]


def interval(values: np.ndarray, seed: int = 0, draws: int = 10_000) -> tuple[float, float]:
    """95 % bootstrap interval of the mean over documents."""
    index = np.random.default_rng(seed).integers(0, len(values), (draws, len(values)))
    low, high = np.percentile(values[index].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def report(path: Path) -> str:
    """Mean KL of every choice, and the paired difference to the profile's, per budget."""
    measured = rows(path)
    names = ["profile", "random", "most_stable", "none"]
    kl: dict[tuple[int, str], dict[str, list[float]]] = {}
    top1: dict[tuple[int, str], list[float]] = {}
    for row in measured:
        if row["through"] == "masks":
            at = row["budget"], row["set"].split(".")[0]
            kl.setdefault(at, {}).setdefault(row["document"], []).append(row["kl"])
            top1.setdefault(at, []).append(row["top1"])
    header = ["budget", "documents", *(f"{name}: KL (top-1)" for name in names)]
    header += ["random - profile", "most_stable - profile"]
    table = [header, ["---"] * len(header)]
    for budget in sorted({budget for budget, _ in kl}):
        documents = sorted(kl[budget, "profile"])
        means = {
            name: np.array([np.mean(kl[budget, name][document]) for document in documents])
            for name in names
        }
        cells = [str(budget), str(len(documents))]
        cells += [f"{means[n].mean():.4f} ({np.mean(top1[budget, n]):.3f})" for n in names]
        for name in ("random", "most_stable"):
            difference = means[name] - means["profile"]
            low, high = interval(difference)
            cells.append(f"{difference.mean():+.4f} [{low:+.4f}, {high:+.4f}]")
        table.append(cells)
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    by_masks = {key(row)[:3]: row["kl"] for row in measured if row["through"] == "masks"}
    pairs = [
        (row["kl"], by_masks[key(row)[:3]])
        for row in measured
        if row["through"] == "cache" and key(row)[:3] in by_masks
    ]
    if pairs:
        worst = max(abs(one - two) for one, two in pairs)
        lines.append(
            f"\nThe same through FlexiCacheDynamicCache: {len(pairs)} measurements, KL differs by "
            f"at most {worst:.2g}."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="jsonl, one row per measurement")
    parser.add_argument("--profile", help="default: the one that belongs to the model")
    parser.add_argument("--leval", nargs="+", default=[], metavar="TASK")
    parser.add_argument("--data", type=Path, help="folder with leval/")
    parser.add_argument("--documents", type=int, default=2, help="of every task")
    parser.add_argument(
        "--skip",
        type=int,
        default=0,
        help="documents of every task to pass over: those the profile was made of",
    )
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--cache", type=int, default=0, metavar="N", help="documents to verify")
    parser.add_argument("--draws", type=int, default=2, help="of random heads, per document")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report", action="store_true", help="print the tables and stop")
    args = parser.parse_args()
    if not args.report:
        measure(args)
    print(report(args.out))


if __name__ == "__main__":
    main()
