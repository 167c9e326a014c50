"""KV heads of a layer: how many there are, and which of them this process holds.

Tensor parallelism cuts the key projection by output features, so that rank r of n holds the heads
`[r * h, (r + 1) * h)` of each layer, h = heads / n. The configuration keeps the whole number.
"""

from __future__ import annotations

from typing import Any


def kv_heads(text: Any, layer: int | None = None) -> int:
    """KV heads of one layer of the whole model, or the most that any of its layers has.

    Args:
        text: configuration of the decoder. Some (Gemma 4) give full-attention layers heads of their
            own number and dimension, and refuse to tell one number for all layers.
        layer: None for all layers.
    """
    layers = layer_configs(text) if layer is None else [text.per_layer_config[layer]]
    return max(map(_kv_heads, layers))


def head_dim(text: Any) -> int | None:
    """Dimension of the heads; None if the configuration does not say, or layers differ."""
    dims = {
        int(getattr(c, "head_dim", None) or getattr(c, "hidden_size", 0) // c.num_attention_heads)
        for c in layer_configs(text)
    }
    return (dims.pop() or None) if len(dims) == 1 else None


def _kv_heads(config: Any) -> int:
    if getattr(config, "multi_query", False):
        return 1
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def layer_configs(text: Any) -> list[Any]:
    """The configuration of every layer that may differ, or the one of all."""
    return list(text.per_layer_config) if text.is_heterogeneous else [text]


def tensor_parallel_rank(model_or_config: Any) -> int | None:
    """Which of the tensor-parallel processes this is; None where only a configuration is known."""
    if not hasattr(model_or_config, "config"):
        return None
    mesh = getattr(model_or_config, "_device_mesh", None)
    if mesh is None:
        return 0
    if "tp" in (mesh.mesh_dim_names or ()):
        mesh = mesh["tp"]
    return int(mesh.get_local_rank()) if mesh.ndim == 1 else None


def held_heads(found: int, heads: int, rank: int | None, layer: int) -> range:
    """The heads of the whole model that `found` heads of keys in this process are.

    Args:
        found: heads of the keys that the cache was given.
        heads: heads of the layer in the configuration.
        rank: see `tensor_parallel_rank`.
        layer: its number, for the message.

    Raises:
        ValueError: the layer is sharded and nobody said how.
    """
    if found >= heads:
        return range(found)
    where = f"layer {layer} has {found} KV heads in this process, and {heads} in the configuration"
    if rank is None:
        raise ValueError(
            f"{where}: the model is sharded, and its configuration does not say which of the heads "
            "are here. Pass the model itself: FlexiCacheDynamicCache(model, ...)"
        )
    if heads % found or (rank + 1) * found > heads:
        raise ValueError(
            f"{where}, expected an equal share of heads for each tensor-parallel process (this is "
            f"rank {rank}): use a number of processes that divides {heads}"
        )
    return range(rank * found, (rank + 1) * found)
