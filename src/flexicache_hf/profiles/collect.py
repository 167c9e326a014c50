"""Record the top-K pages of every decode step of dense generations (section 3.1 of the paper).

The model runs unchanged: an attention function that only looks on is put around its own one. Pages
are ranked as in decode: `max` over the query group of `sum_d max(q_d kmin_d, q_d kmax_d)`, float32,
raw; full pages only, the last page always first. Rankings are stored in order, so that one record
serves every K up to the recorded one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..models.support import tiered_layers
from ..models.versions import cache_argument
from .profile import model_facts
from .records import CollectSettings, Record, load_record, record_path, save_record
from .texts import Text, prompt_ids

# attention implementation -> our name while recording (free of words transformers reacts to)
WRAPPED = {
    "sdpa": "flexicache_record",
    "eager": "flexicache_record_eager",
    "flexicache": "flexicache_record_2",
    "flexicache_eager": "flexicache_record_2_eager",
}


def rank_pages(query: Tensor, bounds: Tensor, num_pages: int, top_k: int) -> Tensor:
    """Pages of one sequence in descending order of score, the last page first.

    Args:
        query: `[H_q, D]`, after rotary embedding.
        bounds: `[H_kv, full pages, 2 D]`: per page the max, then the min, of its keys. May hold
            the last page, if that is full.
        num_pages: N, with the last, perhaps partial page.
        top_k: how many to return; fewer pages are padded by -1.

    Returns:
        `[H_kv, top_k]` int64. Equal scores go to the earlier page.
    """
    heads, _, width = bounds.shape
    grouped = query.float().view(heads, -1, width // 2)
    # sum_d max(q kmin, q kmax) = sum over q > 0 of q kmax + sum over q < 0 of q kmin
    signed = torch.cat((grouped.clamp(min=0), grouped.clamp(max=0)), dim=-1)
    scores = (signed @ bounds[:, : num_pages - 1].mT).amax(dim=1)
    best = scores.argsort(dim=-1, descending=True, stable=True)[:, : top_k - 1]
    ranked = torch.full((heads, top_k), -1, dtype=torch.int64, device=best.device)
    ranked[:, 0] = num_pages - 1
    ranked[:, 1 : 1 + best.shape[1]] = best
    return ranked


class PageRecorder:
    """Looks on at the attention of one sequence and keeps the ranking of every decode step."""

    def __init__(
        self, settings: CollectSettings, prompt_tokens: int, layers: Iterable[int] | None = None
    ) -> None:
        self.settings = settings
        self._layers = None if layers is None else frozenset(layers)  # None: all of them
        self.prompt_tokens = prompt_tokens
        self._bounds: dict[tuple[int, int], Tensor] = {}  # (layer, page size) -> [H, pages, 2 D]
        self._ranked: dict[int, dict[int, list[Tensor]]] = {}  # page size -> layer -> per step

    def observe(self, layer: int, query: Tensor, key: Tensor) -> None:
        """Rank the pages of `key` `[1, H_kv, T, D]` for a one-token `query` `[1, H_q, 1, D]`.

        Prefill and layers that do not keep every token (sliding windows) are passed over.
        """
        if query.shape[2] != 1 or (self._layers is not None and layer not in self._layers):
            return
        tokens = key.shape[2]
        for size in self.settings.page_sizes:
            rankings = self._ranked.setdefault(size, {}).setdefault(layer, [])
            if tokens != self.prompt_tokens + len(rankings) + 1:
                continue
            bounds = self._extended(layer, size, key[0])
            total = -(-tokens // size)
            rankings.append(rank_pages(query[0, :, 0], bounds, total, self.settings.top_k).cpu())

    def _extended(self, layer: int, size: int, key: Tensor) -> Tensor:
        known = self._bounds.get((layer, size))
        start, full = (0 if known is None else known.shape[1]), key.shape[1] // size
        if known is not None and start == full:
            return known
        pages = key[:, start * size : full * size].float()
        pages = pages.reshape(key.shape[0], full - start, size, key.shape[2])
        fresh = torch.cat((pages.amax(dim=2), pages.amin(dim=2)), dim=-1)
        joined = fresh if known is None else torch.cat((known, fresh), dim=1)
        self._bounds[layer, size] = joined
        return joined

    def record(self, task: str, name: str, info: dict[str, Any]) -> Record:
        """What was seen.

        Raises:
            RuntimeError: no layer showed every decode step.
        """
        pages, num_pages = {}, {}
        layers: tuple[int, ...] = ()
        for size, by_layer in self._ranked.items():
            steps = max(map(len, by_layer.values()), default=0)
            layers = tuple(sorted(i for i, seen in by_layer.items() if len(seen) == steps > 0))
            if not layers:
                break
            if len({by_layer[layer][0].shape for layer in layers}) > 1:
                raise RuntimeError(
                    "layers have different numbers of KV heads; profiles need one number"
                )
            pages[size] = torch.stack(
                [torch.stack([by_layer[layer][step] for layer in layers]) for step in range(steps)]
            )
            lengths = self.prompt_tokens + 1 + torch.arange(steps)
            num_pages[size] = (lengths + size - 1) // size
        if not layers:
            raise RuntimeError(
                "no attention layer showed its decode steps: the model does not use transformers' "
                "attention interface, or has no layer with full attention"
            )
        return Record(task, name, pages, num_pages, layers, info)


@contextmanager
def recording(model: Any, recorder: PageRecorder) -> Iterator[None]:
    """Within this context `recorder` sees the attention of `model`; afterwards all is as before.

    Raises:
        ValueError: the model's attention implementation can not be wrapped.
        RuntimeError: another recording is going on in this process.
    """
    config = model.config.get_text_config(decoder=True)
    base = config._attn_implementation
    if base not in WRAPPED:
        raise ValueError(
            f"attn_implementation is {base!r}, but recording needs 'sdpa' or 'eager'; load the "
            "model with attn_implementation='sdpa'"
        )
    name = WRAPPED[base]
    if name in ALL_ATTENTION_FUNCTIONS:
        raise RuntimeError("another recording is going on in this process; finish that one first")

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Any:
        recorder.observe(module.layer_idx, query, key)
        return _base_attention(base, module)(module, query, key, value, mask, **kwargs)

    # The mask function stays registered (it is transformers' own); the attention function does not.
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    ALL_ATTENTION_FUNCTIONS[name] = attention
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = base
        del ALL_ATTENTION_FUNCTIONS[name]


def _base_attention(base: str, module: Any) -> Callable[..., Any]:
    if base == "eager":  # every model file has its own: sinks, soft capping
        function = sys.modules[type(module).__module__].eager_attention_forward
    else:
        function = ALL_ATTENTION_FUNCTIONS[base]
    return function


@torch.no_grad()
def record_generation(
    model: Any, ids: Sequence[int], settings: CollectSettings, text: Text
) -> Record:
    """One dense greedy generation of `settings.steps` decode steps after the prompt `ids`.

    The end-of-sequence token is never chosen, so that every document gives the same number of
    steps.
    """
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=model.config)
    full = tiered_layers(config, cache.layers)
    if not full:
        raise ValueError(
            f"{config.model_type} has no full-attention layer that can be tiered (its layers are "
            "sliding, linear or latent, or select what they attend to themselves), expected one: "
            "head profiles do not apply to it"
        )
    recorder = PageRecorder(settings, len(ids), full)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and len(ids) + settings.steps + 1 > limit:
        raise ValueError(
            f"{len(ids)} prompt tokens and {settings.steps} steps exceed the model's "
            f"max_position_embeddings = {limit}; lower max_prompt_tokens or steps"
        )
    prompt = torch.tensor([list(ids)], device=model.device)
    with recording(model, recorder):
        model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            num_beams=1,
            min_new_tokens=settings.steps + 1,
            max_new_tokens=settings.steps + 1,  # the first token comes from the prefill
            **{cache_argument(model): cache},
        )
    info = {**model_facts(model.config), "prompt_tokens": len(ids)}
    return recorder.record(text.task, text.name, info)


@dataclass
class Progress:
    """How far a collection has come; `skipped` texts had a record already."""

    done: int = 0
    skipped: int = 0
    total: int = 0
    files: list[Path] = field(default_factory=list)


def collect(
    model: Any,
    tokenizer: Any,
    texts: Iterable[Text],
    folder: Path,
    settings: CollectSettings,
    *,
    share: tuple[int, int] = (0, 1),
    report: Callable[[Progress, Text], None] | None = None,
) -> Progress:
    """Record every text that has no record yet in `folder`, one safetensors file each.

    Args:
        model: a causal language model of transformers.
        tokenizer: of that model.
        texts: what to generate about.
        folder: of the records; shared by all processes.
        settings: what to record; records made with other settings are made again.
        share: `(index, count)` of this process; text i belongs to process `i % count`.
        report: called after every text, with the text.
    """
    mine = [text for i, text in enumerate(texts) if i % share[1] == share[0]]
    progress = Progress(total=len(mine))
    for text in mine:
        path = record_path(folder, text)
        if path.is_file() and load_record(path).info["settings"] == settings.plain():
            progress.skipped += 1
        else:
            ids = prompt_ids(tokenizer, text, settings.max_prompt_tokens)
            record = record_generation(model, ids, settings, text)
            save_record(record, settings, path)
        progress.done += 1
        progress.files.append(path)
        if report is not None:
            report(progress, text)
    return progress
