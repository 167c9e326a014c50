"""Teacher-forced fidelity: how close a method's next-token distributions are to the dense model's.

The dense model continues a prompt greedily for N tokens, end tokens suppressed. Every method is fed
the same tokens one by one, and its distributions are compared with the dense ones. No reference
text is needed, errors do not compound, and a few hundred steps a document give little noise.

The dense side is kept on disk: the tokens, the best `TOP` log-probabilities of each step, and the
log of what is left. KL is taken over these TOP + 1 outcomes. Merging outcomes can only lower KL, so
it is a lower bound; what is merged has little mass.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eval.decode import Stream, next_token
from eval.models import identity

TOP = 1024
FORMAT = 1


@dataclass(frozen=True)
class DenseReference:
    """A dense continuation and its distributions.

    tokens: `[N + 1]`; the distributions are those after feeding `tokens[i]`, for `tokens[i + 1]`.
    ids: `[N, TOP]` most likely tokens; logprobs: `[N, TOP]`; rest: `[N]`, log of the mass outside.
    """

    tokens: Tensor
    ids: Tensor
    logprobs: Tensor
    rest: Tensor

    @property
    def steps(self) -> int:
        return len(self.rest)


@dataclass(frozen=True)
class Fidelity:
    """Per step: KL(dense || method) in nats, whether the likeliest tokens agree, and the method's
    negative log-likelihood of the dense continuation in nats."""

    kl: list[float]
    top1: list[bool]
    nll: list[float]

    def means(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in vars(self).items()}


@dataclass(frozen=True)
class ReferenceFile:
    """Where the reference of one prompt is kept."""

    path: Path

    @classmethod
    def of(
        cls, folder: Path, model: Any, ids: Sequence[int], steps: int, stop: set[int]
    ) -> ReferenceFile:
        """The file for `steps` dense tokens after the prompt `ids`, none of them in `stop`."""
        content = [FORMAT, TOP, identity(model), list(ids), steps, sorted(stop)]
        name = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
        return cls(folder / f"{name}.safetensors")

    def exists(self) -> bool:
        return self.path.is_file()

    def load(self, device: torch.device | str = "cpu") -> DenseReference:
        return DenseReference(**load_file(self.path, device=str(device)))

    def make(self, stream: Stream, logits: Tensor, steps: int, stop: set[int]) -> None:
        """Continues a dense stream that holds the prompt; `logits` `[V]` are those after it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        save_file(vars(_continue(stream, logits, steps, sorted(stop))), partial)
        partial.rename(self.path)  # atomic: other processes see all of it or nothing


def compare(stream: Stream, reference: DenseReference) -> Fidelity:
    """Feeds the reference's tokens to a method's stream that holds the prompt."""
    logits = stream.feed(reference.tokens[:-1].tolist())  # [N, V]
    found = logits.log_softmax(-1)
    targets = reference.tokens[1:, None].long()
    return Fidelity(
        kl=_kl(reference, found).tolist(),
        top1=(found.argmax(-1) == reference.ids[:, 0]).tolist(),
        nll=(-found.gather(-1, targets)[:, 0]).tolist(),
    )


def _kl(reference: DenseReference, found: Tensor) -> Tensor:
    """KL of each step over the reference's outcomes and "any other"; `found` is `[N, V]`."""
    ids = reference.ids.long()
    inside = found.gather(-1, ids)
    outside = found.scatter(-1, ids, -torch.inf).logsumexp(-1)
    terms = reference.logprobs.exp() * (reference.logprobs - inside)
    rest = reference.rest.exp() * (reference.rest - outside)
    return terms.sum(-1) + torch.where(reference.rest.isneginf(), 0.0, rest)


def _continue(stream: Stream, logits: Tensor, steps: int, banned: list[int]) -> DenseReference:
    tokens = [next_token(logits, banned)]
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(steps):
        logprobs = stream.feed([tokens[-1]])[-1].log_softmax(-1)
        best = logprobs.topk(min(TOP, len(logprobs)))
        rest = logprobs.index_fill(-1, best.indices, -torch.inf).logsumexp(-1)
        parts.append((best.indices.int(), best.values, rest))
        tokens.append(next_token(logprobs, banned))
    columns = [torch.stack(column).cpu() for column in zip(*parts)]
    return DenseReference(torch.tensor(tokens, dtype=torch.int32), *columns)
