"""The full cache under a selector: keys and values of every token, and one state per layer and row.

`copy.deepcopy` of a cache is a branch: one prefilled document serves several questions.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from flexicache_hf.models.support import tiered_layers

from .attention import LAYER, Attention
from .growing import Growing
from .ledger import Ledger
from .views import Prompt, Step

if TYPE_CHECKING:
    from .base import Selector


class MaskCache(DynamicCache):
    """transformers' DynamicCache whose full-attention layers attend through `selector`."""

    def __init__(self, config: Any, selector: Selector) -> None:
        super().__init__(config=config)
        self.ledger = Ledger()
        for index in tiered_layers(config.get_text_config(decoder=True), self.layers):
            self.layers[index] = MaskLayer(index, selector, self.ledger)

    def replay(self, recorded: MaskCache) -> None:
        """Take over the prompt of `recorded`, whose states are its `Prompt`s."""
        for index, (layer, source) in enumerate(zip(self.layers, recorded.layers)):
            if isinstance(layer, MaskLayer):
                layer.replay(source)
            else:
                self.layers[index] = copy.deepcopy(source)


class AttendingLayer(DynamicLayer):
    """A cache layer that attends itself (see `attention`): it tags the keys it returns."""

    is_croppable = False
    keys: Tensor  # transformers' None before the first update is of no use here
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.pending = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.pending:
            raise RuntimeError(
                "this cache's keys were never attended by the method: use it inside its session, "
                "with a model whose attention goes through transformers' attention interface"
            )
        self.pending = True
        keys, values = self.store(key_states.detach(), value_states.detach())
        tagged = keys.view_as(keys)  # an alias: tagging the stored tensor would make a cycle
        setattr(tagged, LAYER, self)
        return tagged, values

    def store(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep `[B, H_kv, n, D]` more tokens and return what attention is given."""
        return super().update(key, value)

    def attend(self, base: Attention, module: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Attention output `[B, n, H_q, Dv]`."""
        raise NotImplementedError

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "an evaluation cache is not cropped, reordered or re-batched: a method's state has no "
            "past to return to. Use copy.deepcopy(cache) to branch, greedy decoding to generate"
        )

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = reset = _refuse


class MaskLayer(AttendingLayer):
    def __init__(self, index: int, selector: Selector, ledger: Ledger) -> None:
        super().__init__()
        self.index = index
        self.selector = selector
        self.ledger = ledger
        self.states: list[Any] | None = None  # one per row, once the prompt was seen
        self._k, self._v = Growing(), Growing()

    def store(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        self.keys, self.values = self._k.append(key), self._v.append(value)
        return self.keys, self.values

    @torch.no_grad()
    def replay(self, recorded: MaskLayer) -> None:
        if recorded.states is None:
            raise ValueError("the recorded prompt is empty: run the model on it first")
        self.store(recorded.keys, recorded.values)
        self.pads, self.prompt_length = recorded.pads, recorded.prompt_length
        self.states = [self.selector.begin(prompt) for prompt in recorded.states]

    @torch.no_grad()
    def attend(
        self,
        base: Attention,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        self.pending = False
        views = {
            "layer": self.index,
            "module": module,
            "scaling": kwargs["scaling"],
            "softcap": kwargs.get("softcap"),
            "sinks": kwargs.get("s_aux"),
        }
        if self.states is None:
            return self._prompt(base, query, key, value, mask, views, kwargs)
        outputs = [self._decode(row, query, key, value, views) for row in range(len(query))]
        return torch.stack(outputs)

    def _prompt(
        self,
        base: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        views: dict[str, Any],
        kwargs: dict[str, Any],
    ) -> Tensor:
        output, _ = base(views["module"], query, key, value, mask, **kwargs)
        self.pads = left_padding(mask, len(key), key.shape[2])
        self.prompt_length = key.shape[2]
        self.states = []
        for row, pad in enumerate(self.pads):
            prompt = Prompt(
                row=row,
                query=query[row, :, pad:],
                keys=key[row, :, pad:],
                values=value[row, :, pad:],
                **views,
            )
            self.selector.adjust_prompt(prompt, output[row, pad:])
            self.states.append(self.selector.begin(prompt))
        return output

    def _decode(
        self, row: int, query: Tensor, key: Tensor, value: Tensor, views: dict[str, Any]
    ) -> Tensor:
        """The row's new tokens one after the other, `[n, H_q, Dv]`."""
        assert self.states is not None
        selector, state, pad = self.selector, self.states[row], self.pads[row]
        seen, outputs = key.shape[2] - query.shape[2], []
        for token in range(query.shape[2]):
            end = seen + token + 1
            step = Step(
                row=row,
                query=query[row, :, token],
                keys=key[row, :, pad:end],
                values=value[row, :, pad:end],
                index=end - self.prompt_length,
                token=token,
                **views,
            )
            mask = selector.select(step, state)
            weights = step.weights(mask)
            outputs.append(step.output(weights))
            footprint = selector.footprint(step, state, mask)
            dense = step.length * (step.keys.shape[-1] + step.values.shape[-1])
            self.ledger.add(
                step.index,
                step.expand(mask),
                step.groups,
                step.length,
                footprint._replace(metadata=footprint.metadata / dense),
            )
            selector.after(step, state, weights)
        return torch.stack(outputs)


def left_padding(mask: Tensor | None, batch: int, length: int) -> list[int]:
    """Leading pad tokens of each row, from the prompt's `[B or 1, 1, n, T]` attention mask.

    Raises:
        ValueError: a row is padded anywhere else.
    """
    if mask is None:
        return [0] * batch
    last = mask[:, 0, -1, :length]
    visible = (last if last.dtype == torch.bool else last == 0).expand(batch, -1)
    pads = visible.int().argmax(-1)
    if not torch.equal(visible.sum(-1), length - pads):
        raise ValueError("a row is not padded on the left: set tokenizer.padding_side = 'left'")
    return [int(pad) for pad in pads]
