"""The bytes a cache holds, on the device and on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from .integration.layer import FlexiCacheLayer
from .pages.page_pool import nbytes
from .pages.page_table import PageTable


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes allocated, slack included.

    Attributes:
        resident_pages: all pages of unstable heads, on the device.
        working_set: slots of stable heads, on the device.
        metadata: page digests of all heads, on the device.
        tables: page table and slot maps, on the device.
        other_layers: layers that are not tiered (sliding windows, ...), on the device.
        in_flight: keys and values of a prompt that a layer holds until its attention is done.
        host: host pages.
        dense_equivalent: what transformers' DynamicCache would hold for the same tokens, padding
            included.
    """

    resident_pages: int
    working_set: int
    metadata: int
    tables: int
    other_layers: int
    in_flight: int
    host: int
    dense_equivalent: int

    @property
    def device(self) -> int:
        """All device bytes."""
        return (
            self.resident_pages
            + self.working_set
            + self.metadata
            + self.tables
            + self.other_layers
            + self.in_flight
        )

    @property
    def device_fraction(self) -> float:
        """Device bytes over the dense cache's."""
        return self.device / self.dense_equivalent if self.dense_equivalent else 0.0

    def to_dict(self) -> dict[str, int | float]:
        return asdict(self) | {"device": self.device, "device_fraction": self.device_fraction}


def memory_usage(layers: Iterable[Any], table: PageTable) -> MemoryUsage:
    """Bytes that the layers of a cache and its page table hold now."""
    resident = working = metadata = tables = other = flight = host = dense = 0
    for layer in layers:
        if not isinstance(layer, FlexiCacheLayer):
            held = [t for t in vars(layer).values() if isinstance(t, Tensor) and t.ndim == 4]
            other += nbytes(*held)
            dense += nbytes(*held)
            continue
        per_token = 0
        if layer.pending is not None:
            flight += nbytes(*layer.pending)
        if layer.stable is not None:
            slots = layer.stable.working_set
            working += slots.page_bytes()
            metadata += layer.stable.digest_bytes()
            tables += slots.map_bytes()
            host += layer.stable.host.nbytes()
            per_token += _token_bytes(slots.keys) + _token_bytes(slots.values)
        if layer.unstable is not None:
            pools = layer.unstable
            resident += pools.page_bytes()
            metadata += pools.digest_bytes()
            per_token += sum(
                pool.shape[1] * pool.shape[3] * pool.element_size()
                for pool in (pools.keys, pools.values)
            )
        dense += per_token * layer.rows * layer.columns
    tables += table.nbytes()
    return MemoryUsage(resident, working, metadata, tables, other, flight, host, dense)


def _token_bytes(slots: Tensor) -> int:
    return slots.shape[1] * slots.shape[3] * slots.element_size()
