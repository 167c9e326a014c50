"""A tensor that grows along its token dimension without copying itself at every step."""

from __future__ import annotations

from torch import Tensor

BLOCK = 256


class Growing:
    """`[..., length, D]`; `append` writes into slack that is renewed in blocks of 256 tokens."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self.length = 0

    @property
    def view(self) -> Tensor:
        """The tensor so far, `[..., length, D]`, sharing memory with later ones."""
        if self._buffer is None:
            raise RuntimeError("nothing was appended yet")
        return self._buffer[..., : self.length, :]

    def append(self, new: Tensor) -> Tensor:
        """Add `[..., n, D]` and return the view of everything."""
        end = self.length + new.shape[-2]
        if self._buffer is None or end > self._buffer.shape[-2]:
            grown = new.new_empty(*new.shape[:-2], end + BLOCK, new.shape[-1])
            if self._buffer is not None:
                grown[..., : self.length, :] = self.view
            self._buffer = grown
        self._buffer[..., self.length : end, :] = new
        self.length = end
        return self.view
