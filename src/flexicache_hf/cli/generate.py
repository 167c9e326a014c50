"""`flexicache generate`: ask a model about a long document and see what the cache saved."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, TextStreamer

from ..cache import FlexiCacheDynamicCache
from ..config import FlexiCacheConfig
from ..memory import MemoryUsage
from ..models.embedded import reference_text
from ..models.versions import cache_argument

DOCUMENT_TOKENS = 6000
QUESTION = "Explain in a few sentences what the assert statement does, using the text above."


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("generate", help="answer a question about a document")
    parser.add_argument("--model", help="directory or Hub id; default: the embedded SmolLM2-135M")
    parser.add_argument(
        "--document", type=Path, help="text file; default: Python's language reference"
    )
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument(
        "--document-tokens", type=int, default=DOCUMENT_TOKENS, help="cut the document here"
    )
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--profile", help="head profile: directory or Hub repository")
    parser.add_argument("--token-budget", type=int, default=1024, help="tokens each head attends")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--rerank-interval", type=int, default=16)
    parser.add_argument("--paper", action="store_true", help="the published ranking rules")
    parser.add_argument("--host-memory-limit", type=int, help="bytes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto", help="of --model: auto, float32, bfloat16, ...")
    parser.add_argument("--seed", type=int, help="sample with this seed instead of greedily")
    parser.add_argument(
        "--compare-dense", action="store_true", help="run DynamicCache on the same prompt too"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, no stream")
    parser.set_defaults(run=run)


@dataclass
class Answer:
    """One generation and what it cost."""

    text: str
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    device_bytes: int

    @property
    def tokens_per_second(self) -> float:
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"tokens_per_second": self.tokens_per_second}


class _Clock(TextStreamer):  # type: ignore[misc, unused-ignore]
    """Streams the answer, unless silent, and notes when the first token came."""

    def __init__(self, tokenizer: Any, silent: bool) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.silent = silent
        self.begin = time.perf_counter()
        self.first: float | None = None
        self.puts = 0

    def put(self, value: Any) -> None:
        self.puts += 1
        if self.puts == 2:  # the first put is the prompt
            self.first = time.perf_counter()
        if not self.silent:
            super().put(value)

    def end(self) -> None:
        if not self.silent:
            super().end()


def run(args: argparse.Namespace) -> int:
    model, tokenizer = _load(args)
    inputs = _prompt(tokenizer, args).to(model.device)
    make = FlexiCacheConfig.paper if args.paper else FlexiCacheConfig
    config = make(
        token_budget=args.token_budget,
        page_size=args.page_size,
        rerank_interval=args.rerank_interval,
        host_memory_limit=args.host_memory_limit,
    )
    if not args.json:
        print(
            f"\n> {args.question}\n  (document and question: {inputs.input_ids.shape[1]} tokens)\n"
        )
    cache = FlexiCacheDynamicCache(model, args.profile, config=config)
    answer = _generate(model, tokenizer, inputs, cache, args, silent=args.json)
    usage, stats = cache.memory_usage(), cache.stats()
    answer.device_bytes = usage.device
    dense = None
    if args.compare_dense:
        dense_cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        dense = _generate(model, tokenizer, inputs, dense_cache, args, silent=True)
        dense.device_bytes = _dense_bytes(dense_cache)
    if args.json:
        document = {
            "flexicache": answer.to_dict(),
            "dense": dense and dense.to_dict(),
            "memory": usage.to_dict(),
            "stats": stats.to_dict(),
            "unstable_heads": len(cache.profile.unstable_heads),
        }
        print(json.dumps(document, indent=1))
    else:
        _print_table(answer, dense, usage, cache)
    return 0


def _load(args: argparse.Namespace) -> tuple[Any, Any]:
    if args.model is None:
        from ..models.embedded import load_model

        model, tokenizer = load_model()
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    return model.to(args.device), tokenizer


def _prompt(tokenizer: Any, args: argparse.Namespace) -> Any:
    document = args.document.read_text() if args.document else reference_text()
    ids = tokenizer(document, add_special_tokens=False)["input_ids"][: args.document_tokens]
    text = f"{tokenizer.decode(ids)}\n\n{args.question}"
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tokenizer(text, add_special_tokens=False, return_tensors="pt")
    return tokenizer(text, return_tensors="pt")


def _generate(
    model: Any, tokenizer: Any, inputs: Any, cache: Any, args: argparse.Namespace, silent: bool
) -> Answer:
    clock = _Clock(tokenizer, silent)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    output = model.generate(
        **inputs,
        **{cache_argument(model): cache},
        max_new_tokens=args.max_new_tokens,
        do_sample=args.seed is not None,
        streamer=clock,
    )
    end = time.perf_counter()
    prompt = inputs.input_ids.shape[1]
    first = clock.first or end
    return Answer(
        tokenizer.decode(output[0, prompt:], skip_special_tokens=True),
        prompt,
        output.shape[1] - prompt,
        first - clock.begin,
        end - first,
        0,
    )


def _dense_bytes(cache: DynamicCache) -> int:
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _print_table(
    answer: Answer, dense: Answer | None, usage: MemoryUsage, cache: FlexiCacheDynamicCache
) -> None:
    def row(label: str, *cells: str) -> None:
        print(f"{label:<30}" + "".join(f"{cell:>14}" for cell in cells))

    def mib(count: int) -> str:
        return f"{count / 2**20:.1f} MiB"

    both = [answer] if dense is None else [answer, dense]
    total = cache.stats().total
    print()
    row("", *(["FlexiCache"] if dense is None else ["FlexiCache", "DynamicCache"]))
    row("prefill", *(f"{each.prefill_seconds:.2f} s" for each in both))
    row("decode", *(f"{each.tokens_per_second:.1f} tok/s" for each in both))
    row("KV cache on the device", *(mib(each.device_bytes) for each in both))
    row("  of a dense cache", f"{usage.device_fraction:.1%}")
    row("  unstable heads, all pages", mib(usage.resident_pages))
    row("  stable heads, working set", mib(usage.working_set))
    row("  digests and tables", mib(usage.metadata + usage.tables))
    row("KV pages on the host", mib(usage.host))
    row("pages promoted", f"{total.promoted}")
    row("moved to / from the host", mib(total.device_to_host), mib(total.host_to_device))
    row("new tokens", *(str(each.new_tokens) for each in both))
    if dense is not None:
        same = _common_prefix(answer.text, dense.text)
        print(f"\nDense answer: {dense.text}\n(the first {same} characters are the same)")


def _common_prefix(left: str, right: str) -> int:
    length = 0
    for a, b in zip(left, right):
        if a != b:
            break
        length += 1
    return length
