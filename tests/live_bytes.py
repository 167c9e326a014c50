"""Counting the bytes of live tensors while code runs, as a device's allocator would."""

from __future__ import annotations

import weakref
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_OP = "aten::empty.memory_format"  # only host pages are allocated by torch.empty


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made inside that still have a tensor; `peak` is their maximum.

    Storages of `HOST_OP` count as host memory, in `host`, because on a CPU both tiers look alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.host = 0
        self.tensors: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._track(tensor, func.name())
        return out

    def _track(self, tensor: torch.Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            if op == HOST_OP:
                self.host += storage.nbytes()
                return
            self.sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
        self.tensors[key] += 1
        weakref.finalize(tensor, self._drop, key)

    def _drop(self, key: int) -> None:
        self.tensors[key] -= 1
        if not self.tensors[key]:
            del self.tensors[key]
            self.live -= self.sizes.pop(key)
