"""InfiniGen: tokens are fetched from the host on speculation from the layer below."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import Method, Selector
from .growing import Growing
from .ledger import Footprint
from .views import Prompt, Step, at_least_float32


@dataclass(frozen=True)
class InfiniGen(Method):
    """Layer l's scores are guessed from layer l - 1's attention input and a few skewed columns of
    its keys; tokens within `alpha` of a head's best are counted, and every KV head of the layer
    fetches its own best n' tokens, n' the mean count, at most `budget - 1` and the current token.

    The skewing matrix is orthogonal, from the SVD of the rotated queries of the prompt (the
    original uses one text offline). The partial columns are the `ratio` with the largest absolute
    sums over the prompt's skewed queries and keys. The first `dense_layers` layers are dense.
    """

    alpha: float = 5.0
    ratio: float = 0.2
    dense_layers: int = 2
    per_query_head: bool = False

    name: ClassVar[str] = "infinigen"
    title: ClassVar[str] = "InfiniGen"
    paper: ClassVar[str] = "https://arxiv.org/abs/2406.19707"
    gqa: ClassVar[str] = (
        "KV head, the same count for all heads of a layer; one skewing per group, scores combined "
        "by max (our choice: the original is MHA only; per_query_head=True keeps them apart)"
    )
    accounting: ClassVar[str] = (
        "budget = cap on attended tokens outside the dense layers, alpha decides below it; "
        "resident = attended, moved = attended without the current token; metadata ratio/2"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio is {self.ratio}, expected above 0 and at most 1")
        if self.dense_layers < 1:
            raise ValueError(
                f"dense_layers is {self.dense_layers}, expected at least 1: the first layer has no "
                "layer below to speculate from"
            )

    def notes(self) -> list[str]:
        return ["query head"] if self.per_query_head else []

    def selector(self, model: Any) -> Selector:
        return InfiniGenSelector(self)


@dataclass
class Partial:
    """Skewing `[H_kv, D, r]` restricted to the partial columns, and the keys in it."""

    skew: Tensor
    keys: Growing

    def extend(self, keys: Tensor) -> Tensor:
        """Partial keys `[H_kv, T, r]` of all `keys` `[H_kv, T, D]`."""
        new = keys[:, self.keys.length :]
        return self.keys.append(new @ self.skew) if new.shape[1] else self.keys.view


@dataclass(frozen=True)
class InfiniGenSelector(Selector):
    method: InfiniGen
    # Attention input and (cos, sin) of each layer in the current forward.
    inputs: dict[int, tuple[Tensor, tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def hooks(self, model: Any) -> list[Any]:
        modules = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]
        if not modules or not all(hasattr(m, "q_proj") for m in modules):
            raise ValueError(
                f"{type(model).__name__} has no separate q_proj: InfiniGen computes a layer's "
                "queries from the input of the layer below and cannot run on it"
            )
        return [m.register_forward_pre_hook(self._record, with_kwargs=True) for m in modules]

    def _record(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self.inputs[module.layer_idx] = (hidden.detach(), kwargs["position_embeddings"])

    def begin(self, prompt: Prompt) -> Partial | None:
        if prompt.layer < self.method.dense_layers:
            return None
        skew = skewing(prompt.per_group(prompt.query).flatten(1, 2))
        columns = partial_columns(
            prompt.per_group(prompt.query), prompt.keys, skew, self.method.ratio
        )
        partial = Partial(skew.gather(2, columns[:, None].expand(-1, skew.shape[1], -1)), Growing())
        partial.extend(prompt.keys)
        return partial

    def select(self, step: Step, state: Partial | None) -> Tensor:
        earlier = step.length - 1
        if state is None:
            return torch.ones(step.keys.shape[:2], dtype=torch.bool, device=step.keys.device)
        scores = self.speculate(step, state)[..., :earlier]  # [H_kv, g, T - 1]
        near = scores > scores.amax(-1, keepdim=True) - self.method.alpha
        count = min(int(near.sum(-1).float().mean()), self.method.budget - 1, earlier)
        heads = scores.flatten(0, 1) if self.method.per_query_head else scores.amax(1)
        chosen = torch.zeros_like(heads, dtype=torch.bool)
        chosen.scatter_(-1, heads.topk(count, -1).indices, True)
        return F.pad(chosen, (0, 1), value=True)

    def speculate(self, step: Step, state: Partial) -> Tensor:
        """Guessed logits `[H_kv, g, T]`."""
        hidden, (cos, sin) = self.inputs[step.layer - 1]
        query = project_query(step.module, hidden[step.row, step.token])
        row = min(step.row, len(cos) - 1)  # rows may share their positions
        cos, sin = cos[row, step.token], sin[row, step.token]
        apply = sys.modules[type(step.module).__module__].apply_rotary_pos_emb
        query = apply(query[None, :, None], query[None, :, None], cos[None, None], sin[None, None])
        skewed = step.per_group(query[0][0, :, 0]) @ state.skew
        return at_least_float32(skewed @ state.extend(step.keys).transpose(1, 2)) * step.scaling

    def footprint(self, step: Step, state: Partial | None, mask: Tensor) -> Footprint:
        union = step.expand(mask).unflatten(0, (-1, step.groups)).any(1)
        held = union.sum() / len(union)
        if state is None:
            return Footprint(resident=held, moved=held - 1)
        return Footprint(held, held - 1, metadata=step.length * state.skew.shape[-1])


def project_query(module: Any, hidden: Tensor) -> Tensor:
    """Queries `[H_q, D]` of one token's attention input, before RoPE and after any norm."""
    query = module.q_proj(hidden).unflatten(-1, (-1, module.head_dim))
    return module.q_norm(query) if hasattr(module, "q_norm") else query


def skewing(queries: Tensor) -> Tensor:
    """Right singular vectors of `[H, n, D]`, by falling singular value, `[H, D, D]`.

    Taken as the eigenvectors of Q^T Q, so that a long prompt costs D^3 and not n D^2.
    """
    q = at_least_float32(queries)
    return torch.linalg.eigh(q.transpose(1, 2) @ q).eigenvectors.flip(-1).to(queries.dtype)


def partial_columns(query: Tensor, keys: Tensor, skew: Tensor, ratio: float) -> Tensor:
    """Indices `[H_kv, r]` of the skewed columns with the largest sums of absolute values over
    queries `[H_kv, g, T, D]` (mean over the group) and keys `[H_kv, T, D]`."""
    weight = at_least_float32(query @ skew[:, None]).abs().sum(2).mean(1)
    weight = weight + at_least_float32(keys @ skew).abs().sum(1)
    return weight.topk(max(1, round(ratio * keys.shape[-1])), -1).indices
