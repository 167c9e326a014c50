"""Which heads count as unstable when no profile says so."""

from __future__ import annotations

from collections.abc import Sequence

FRACTION = 0.25  # of all KV heads, as in the paper


def default_unstable_heads(
    layers: Sequence[int], depth: int, heads: int, fraction: float = FRACTION
) -> list[tuple[int, int]]:
    """A quarter of the KV heads, in the middle of the stack.

    The rule: go through the tiered layers from the middle of the stack outwards and take the first
    half of each one's heads (rounded up) until a quarter of all heads is taken. In the profiles the
    FlexiCache authors publish, unstable heads crowd in the middle (52 of Llama-3.1-8B's 64 lie in
    layers 7 to 23); which head of a layer it is cannot be guessed.

    Args:
        layers: model layers that are tiered.
        depth: layers of the model.
        heads: KV heads per layer.

    Returns:
        Sorted `(layer, kv_head)` pairs.
    """
    wanted = round(fraction * len(layers) * heads)
    middle = (depth - 1) / 2
    outwards = sorted(layers, key=lambda layer: (abs(layer - middle), layer))
    pairs = [(layer, head) for layer in outwards for head in range((heads + 1) // 2)]
    return sorted(pairs[:wanted])
