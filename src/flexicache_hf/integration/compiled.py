"""Decode attention as one opaque operator, so that `torch.compile` sees no Python of ours.

A compiled forward cannot pass Python objects to an operator, so a layer is passed as a number. The
numbers belong to the attention registration: a weak table, from which a layer vanishes with its
cache. Everything that changes from step to step (lengths, pages, rankings) stays inside the
operator, where the compiler neither traces nor guards it.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .layer import FlexiCacheLayer

_layers: WeakValueDictionary[int, FlexiCacheLayer] = WeakValueDictionary()
_numbers = count()


def number_of(layer: FlexiCacheLayer) -> int:
    """A number by which the operator finds `layer`."""
    number = next(_numbers)
    _layers[number] = layer
    return number


@torch.library.custom_op("flexicache_hf::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    layer: int,
    owned: bool,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Store `key`, `value` `[B, H_kv, q, D]` in layer number `layer` and attend to it.

    They are not stored if `owned` is False: another layer's, which has stored them.

    Returns:
        `[B, q, H_q, D_v]`.
    """
    held = _layers[layer]
    module = held.module()
    assert module is not None and held.base is not None, "a prompt comes before decode steps"
    if owned:
        held.hold(key, value)
    extras = {name: x for name, x in (("softcap", softcap), ("s_aux", sinks)) if x is not None}
    out, _ = held.attend(module, query, mask, held.base, held.ignored, scaling=scaling, **extras)
    return out.clone() if out.data_ptr() in (query.data_ptr(), value.data_ptr()) else out


@attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    layer: int,
    owned: bool,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1])
