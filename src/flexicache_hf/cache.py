"""`FlexiCacheDynamicCache`: the object given to `generate(past_key_values=...)`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from .config import FlexiCacheConfig
from .errors import FlexiCacheWarning
from .integration.attention import use_flexicache
from .integration.cache_state import Shared
from .integration.layer import FlexiCacheLayer
from .integration.prompt_guard import guard_prompts
from .integration.untiered_layers import cropped_layer
from .memory import MemoryUsage, memory_usage
from .models.kv_heads import kv_heads, tensor_parallel_rank
from .models.support import check_supported, cross_layers, tiered_layers
from .pages.page_table import PageTable
from .profiles.default_rule import choose_profile
from .profiles.learning import HeadLearner
from .profiles.profile import HeadProfile
from .stats import CacheStats
from .tiers.host_pages import HostBudget
from .tiers.transfer import QueueFactory, QueuePerDevice


class FlexiCacheDynamicCache(Cache):
    """A growing cache whose stable heads keep only their working set on the device.

    Args:
        model_or_config: the model, or its configuration. With the model, generate() can also tell
            the cache where a prompt ends, and prompts that do not continue the cached text are
            refused.
        profile: which heads are unstable: a `HeadProfile`, a directory, or a Hub repository. None
            takes the model's own, bundled with this package or beside the model; if there is
            neither, the rule of `default_unstable_heads`, with a warning. "auto" learns the heads
            while generating (`learning.py`).
        token_budget, page_size, rerank_interval: see `FlexiCacheConfig`.
        config: all other choices; the three above then come from it unless they are given too.
        queue_factory: how pages travel, see `flexicache_hf.tiers.transfer`; tests replace it.

    Raises:
        ValueError: a field is out of range, the profile is for another model, the model's attention
            implementation cannot be replaced, or the model is of an unsupported kind (`support`).
    """

    def __init__(
        self,
        model_or_config: Any,
        profile: HeadProfile | str | Path | None = None,
        *,
        token_budget: int | None = None,
        page_size: int | None = None,
        rerank_interval: int | None = None,
        config: FlexiCacheConfig | None = None,
        queue_factory: QueueFactory | None = None,
    ) -> None:
        given = {
            "token_budget": token_budget,
            "page_size": page_size,
            "rerank_interval": rerank_interval,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        self.config = (config or FlexiCacheConfig()).replace(**changes)
        model_config = getattr(model_or_config, "config", model_or_config)
        check_supported(model_or_config, model_config)
        text = model_config.get_text_config(decoder=True)
        layers = DynamicCache(config=text).layers
        tiered = tiered_layers(text, layers)
        if not tiered:
            warnings.warn(
                f"{type(text).__name__} has no full-attention layer that can be tiered "
                "(sliding-window, linear and latent-attention layers, and models that select what "
                "they attend to themselves, stay as they are): this cache will behave like "
                "DynamicCache",
                FlexiCacheWarning,
                stacklevel=2,
            )
        heads = [kv_heads(text, index) for index in tiered]
        learner = None
        if profile == "auto":
            learner = HeadLearner(self.config, model_config, tiered, heads)
            every = [(i, head) for i, count in zip(tiered, heads) for head in range(count)]
            chosen = HeadProfile.from_unstable_heads(model_config, every, rule="still learning")
        else:
            chosen = choose_profile(profile, model_or_config, model_config, tiered)
        if tiered:
            use_flexicache(model_config)

        self._table = PageTable(self.config.page_size, len(tiered))
        self._stats = CacheStats()
        unstable = [chosen.unstable_in(index) for index in tiered]
        self._shared = Shared(
            self.config,
            self._table,
            self._stats,
            HostBudget(self.config.host_memory_limit, list(zip(heads, unstable, strict=True))),
            queue_factory or QueuePerDevice(),
            lambda: getattr(text, "_attn_implementation", None),
            chosen,
            tensor_parallel_rank(model_or_config),
            learner=learner,
        )
        self._cross = cross_layers(text)
        self._new_layers: Callable[[], list[Any]] = lambda: DynamicCache(config=text).layers
        for ordinal, index in enumerate(tiered):
            layers[index] = FlexiCacheLayer(self._shared, ordinal, index, heads[ordinal])
        super().__init__(layers=layers)
        if model_config is not model_or_config:
            self._shared.guarded = guard_prompts(model_or_config)

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Keys and values of each layer, and its sliding window, as DynamicCache gives them.

        Everything stored, brought together from both tiers; zero where padding was.
        """
        self._check_between_forwards()
        for layer in self.layers:
            if isinstance(layer, FlexiCacheLayer):
                keys, values = layer.everything() or (None, None)
            else:
                keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            yield keys, values, getattr(layer, "_sliding_window_tensor", None)

    @property
    def is_initialized(self) -> bool:
        """Whether every layer with keys has some; models take the first forward from it."""
        # tiered layers cannot be initialised early, which is what transformers' own asks for
        layers = [
            layer
            for layer in self.layers
            if isinstance(layer, FlexiCacheLayer) or getattr(layer, "supports_early_init", True)
        ]
        return len(layers) > 0 and all(layer.is_initialized for layer in layers)

    @property
    def profile(self) -> HeadProfile:
        """Which heads are unstable; with `profile="auto"`, all of them until enough is learned."""
        return self._shared.profile

    # -- what it did and holds -------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Counters of every step and in total: who ranked, what moved, what was attended."""
        return self._stats

    def memory_usage(self) -> MemoryUsage:
        """Bytes on the device and on the host now, everything allocated counted."""
        return memory_usage(self.layers, self._table)

    # -- transformers' contract, for all layers together -----------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (columns) of every row.

        As in transformers >= 5.24 the argument is zero or negative.

        Raises:
            ValueError: it is positive.
            RuntimeError: a layer cannot go back: what an interruption left is unknown, or a
                sliding or linear layer did not record its past (`activate_past_recording`), or
                holds a recurrent state, which knows no past. Nothing has changed then.
            HostMemoryError: rows that share the page that is cut need more than the limit.
        """
        remove = -int(tokens_to_remove)  # generate() may pass a tensor
        if remove < 0:
            raise ValueError(
                f"tokens_to_remove is {-remove}, expected zero or a negative number: "
                "crop(-n) removes the last n tokens"
            )
        table, tiered = self._table, self._tiered()
        self._check_stored()
        left = max(self.get_seq_length() - remove, 0)
        pending = self._pending()
        stopped = pending or not self._consistent()
        cropped = {
            number: cropped_layer(layer, number, left, remove, stopped)
            for number, layer in enumerate(self.layers)
            if not isinstance(layer, FlexiCacheLayer) and number not in self._cross
        }
        table.check_crop(left)
        if not stopped and left < table.columns:
            self._check_host(table.pages_cropped(left))
        with table.changing("crop"):
            for number, layer in cropped.items():
                self.layers[number] = layer
            if pending:  # the last forward may have stopped anywhere
                table.recount()
                self._shared.prefilling = None
            for layer in tiered:
                layer.pending = layer.unanswered = None
            if left < table.columns or not self._consistent():
                self._restart_learning()
                if self._prompt_ids is not None:
                    self._prompt_ids = self._prompt_ids[:, :left]
                copies = table.crop(left)
                for layer in tiered:
                    layer.crop_rows(copies)

    def reset(self) -> None:
        """Forget everything; the same object can take a new prompt, of any number of rows.

        It always works, also after an interruption of anything else, or of itself.
        """
        self._table.unfinished = "reset"
        self._restart_learning()
        self._table.clear()
        self._shared.prefilling = None
        self._shared.verifying = False
        self._prompt_ids = None
        # transformers' layers keep the sizes of what they held, before 5.24 even its length
        fresh = self._new_layers()
        for number, layer in enumerate(self.layers):
            if isinstance(layer, FlexiCacheLayer):
                layer.clear()
                continue
            if getattr(layer, "record_past", False):
                fresh[number].activate_past_recording()
            self.layers[number] = fresh[number]
        self._table.unfinished = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the rows `[rows[i] for i in beam_idx]`, for beam search."""
        if self._tiered():
            self._select("reorder_cache", self._numbers(beam_idx))
        else:
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row; the copies share full pages, on the host and on the device."""
        if self._tiered():
            rows = [row for row in range(self._table.rows) for _ in range(repeats)]
            self._select("batch_repeat_interleave", rows)
        else:
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (numbers or a boolean mask). Of none, an empty cache is left."""
        if self._tiered():
            self._select("batch_select_indices", self._numbers(indices))
        else:
            super().batch_select_indices(indices)

    def join(self, other: FlexiCacheDynamicCache) -> None:
        """Append the rows of `other`, for batches whose rows come and go; `other` is empty then.

        Rows may be of any length: shorter ones count as padded on the left, and padding is not
        stored. Decode steps then need explicit `position_ids` (`cache.lengths`), but no mask.

        Raises:
            ValueError: the caches differ in configuration or heads, or have layers that are not
                tiered.
            RuntimeError: a forward or a change of either was interrupted.
            HostMemoryError: the pages of both need more than the limit. As after every error here,
                neither cache has changed.
        """
        if other is self:
            raise ValueError(
                "a cache cannot join itself: use batch_repeat_interleave() to repeat its rows"
            )
        if (self.config, self.profile.unstable_heads) != (
            other.config,
            other.profile.unstable_heads,
        ):
            raise ValueError("the caches differ in their configuration or unstable heads")
        if len(self._tiered()) != len(self.layers):
            kinds = {type(layer).__name__ for layer in self.layers} - {"FlexiCacheLayer"}
            raise ValueError(
                "rows can only join where every layer is tiered; this model also has "
                f"{', '.join(sorted(kinds))}"
            )
        for cache in (self, other):
            cache._check_between_forwards()
        if not other._table.rows:
            return
        if not self._table.rows:
            raise ValueError("this cache is empty: use the other one")
        pairs = list(zip(self._tiered(), other._tiered(), strict=True))
        for layer, joining in pairs:
            if layer.kind() != joining.kind():
                raise ValueError(
                    f"layer {layer.index} of the caches differs in stable and unstable heads, "
                    f"dimensions or dtype: {layer.kind()} and {joining.kind()}"
                )
        self._check_host(self._table.pages_joined(other._table))
        with self._table.changing("join"):
            self._restart_learning()
            copies = self._table.join(other._table)
            for layer, joining in pairs:
                layer.join_rows(joining, copies)
            self._prompt_ids = None
        other.reset()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens each row holds, padding left out: where its next position begins."""
        return self._table.lengths

    def activate_past_recording(self) -> None:
        """Assisted decoding begins: short multi-token forwards verify candidates."""
        super().activate_past_recording()
        self._shared.verifying = True

    # Tiered layers check for themselves; these stop a forward before it reaches transformers' own.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Raises InterruptedChange if a change of the cache stopped midway."""
        if not torch.compiler.is_compiling():
            self._table.check_whole()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Raises InterruptedChange if a change of the cache stopped midway."""
        if not torch.compiler.is_compiling():
            self._table.check_whole()
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    # -- inside ----------------------------------------------------------------------------------

    _prompt_ids: Tensor | None = None
    """Token ids behind the cached columns, when prompt_guard knows them."""

    def _tiered(self) -> list[FlexiCacheLayer]:
        return [layer for layer in self.layers if isinstance(layer, FlexiCacheLayer)]

    def _restart_learning(self) -> None:
        if self._shared.learner is not None:
            self._shared.learner.restart()

    def _consistent(self) -> bool:
        return all(done == self._table.forwards for done in self._table.progress)

    def _pending(self) -> bool:
        """Some layer holds keys that its attention has not taken up."""
        return any(layer.pending is not None for layer in self._tiered())

    def _check_stored(self) -> None:
        """Raises RuntimeError if an interruption left it unknown what the layers hold."""
        self._table.check_whole()
        for layer in self._tiered():
            if layer.torn:
                raise RuntimeError(
                    f"layer {layer.index} was interrupted while it stored a step, so what it "
                    "holds is unknown: start over with cache.reset()"
                )

    def _numbers(self, rows: Tensor) -> list[int]:
        """Row numbers out of numbers or a mask; raises IndexError for rows that are not there."""
        known = torch.arange(self._table.rows)
        return known[torch.as_tensor(rows).cpu()].tolist() if len(known) else []

    def _check_between_forwards(self) -> None:
        """Raises RuntimeError unless every forward and every change came to its end."""
        self._check_stored()
        if not self._consistent() or self._pending():
            raise RuntimeError(
                "the last forward was interrupted, or its attention is not this cache's: take back "
                "its tokens with cache.crop(-n), or start over with cache.reset()"
            )

    def _check_host(self, pages: int) -> None:
        """Raises HostMemoryError if `pages` page ids need more than the limit, and new memory."""
        if pages > self._table.capacity:
            self._shared.budget.check(pages, self._shared.page_bytes)

    def _select(self, name: str, rows: Sequence[int]) -> None:
        self._check_between_forwards()
        table = self._table
        if not table.rows or list(rows) == list(range(table.rows)):
            return
        if not rows:
            self.reset()
            return
        self._check_host(table.pages_selected(rows))
        with table.changing(name):
            self._restart_learning()
            numbers = torch.tensor(rows, dtype=torch.long)
            for layer in self.layers:
                if not isinstance(layer, FlexiCacheLayer):
                    layer.reorder_cache(numbers)  # linear layers know no other way
            copies = table.select(rows)
            if self._prompt_ids is not None:
                self._prompt_ids = self._prompt_ids[list(rows)]
            for layer in self._tiered():
                layer.select_rows(rows, copies)
