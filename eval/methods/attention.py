"""The attention implementation that methods run under.

It is the model's own (sdpa or eager) for every call whose keys do not come from a cache of ours;
otherwise the cache layer that produced the keys attends. The layer travels as an attribute of the
keys, because transformers does not pass the cache to the attention function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from flexicache_hf.integration.attention import NAMES

LAYER = "_attending_layer"
IMPLEMENTATIONS = {"sdpa": "retention", "eager": "retention_eager"}

Attention = Callable[..., tuple[Tensor, Tensor | None]]


def _eager(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


def _dispatch(base: Attention) -> Attention:
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        layer = getattr(key, LAYER, None)
        if layer is None:
            return base(module, query, key, value, mask, **kwargs)
        return layer.attend(base, module, query, key, value, mask, **kwargs), None

    return attention


AttentionInterface.register(IMPLEMENTATIONS["sdpa"], _dispatch(sdpa_attention_forward))
AttentionInterface.register(IMPLEMENTATIONS["eager"], _dispatch(_eager))
AttentionMaskInterface.register(IMPLEMENTATIONS["sdpa"], sdpa_mask)
AttentionMaskInterface.register(IMPLEMENTATIONS["eager"], eager_mask)


OWN_OF = {name: implementation for implementation, name in NAMES.items()}


@contextmanager
def switched(model: Any) -> Iterator[None]:
    """Run `model` under our implementation; its own comes back whatever happens inside.

    Raises:
        ValueError: the model runs neither sdpa nor eager attention.
    """
    config = model.config.get_text_config(decoder=True)
    found = config._attn_implementation
    own = OWN_OF.get(found, found)  # a model that had a FlexiCache goes on under our name
    if own not in IMPLEMENTATIONS:
        raise ValueError(
            f"the model's attention implementation is {found!r}, but methods can be evaluated over "
            f"{sorted(IMPLEMENTATIONS)} only: load the model with attn_implementation='sdpa'"
        )
    config._attn_implementation = IMPLEMENTATIONS[own]
    try:
        yield
    finally:
        config._attn_implementation = found
