"""Addresses of an engine's device blocks, which tiers copy from and to."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.descriptors import MemoryKind
from penstock.core.errors import ConfigError
from penstock.core.types.kv.layout import BLOCK_FIRST, KvLayout
from penstock.transfer.regions.buffers import region_of


@dataclass(frozen=True, slots=True)
class DeviceBlocks:
    """Blocks of equal size, one after another.

    Attributes:
        address: of the first byte of block 0.
        block_bytes: size of a block.
        owner: keeps the memory alive.
    """

    address: int
    block_bytes: int
    owner: object

    @classmethod
    def of(cls, memory: Sequence[Sequence[object]], layout: KvLayout | None) -> "DeviceBlocks":
        """Find the blocks in an engine's KV memory.

        Args:
            memory: as `seams.KvBlocks.kv_memory` returns it.
            layout: of this memory.

        Raises:
            ConfigError: a block is not one piece of CPU memory.
        """
        regions = [region for rank in memory for region in rank]
        if layout is None or not regions:
            raise ConfigError(
                "kv: the engine has no KV memory to copy; for engine mock, set mock.kv_bytes_per_block"
            )
        if len(regions) != 1 or layout.ranks[0].order != BLOCK_FIRST:
            raise ConfigError(
                f"kv: the engine's KV memory has {len(regions)} regions in order {layout.ranks[0].order!r}; expected one"
                " region in which all layers of a block are contiguous; leave kv out"
            )
        region = region_of(regions[0])
        if region.kind is MemoryKind.VRAM:
            raise ConfigError(
                f"kv: the engine's KV is in the memory of GPU {region.device}; this version has tiers for engines on CPUs only;"
                " leave kv out"
            )
        strides = layout.ranks[0].strides_bytes
        elements = (
            layout.planes * layout.num_layers * layout.block_size * layout.num_kv_heads * layout.head_dim
        )
        block_bytes = strides[0] if strides else elements * layout.element_bytes
        assert region.size_bytes >= layout.ranks[0].num_blocks * block_bytes, (
            "a block is outside of the KV memory"
        )
        return cls(region.address + layout.ranks[0].offset_bytes, block_bytes, region)

    def views(self, block_ids: Sequence[int]) -> list[NDArray[np.uint8]]:
        """View each block as (block_bytes,) uint8, writable."""
        buffer = ctypes.c_uint8 * self.block_bytes
        return [
            np.frombuffer(
                memoryview(buffer.from_address(self.address + block_id * self.block_bytes)), np.uint8
            )
            for block_id in block_ids
        ]

    def addresses(self, block_ids: Sequence[int]) -> NDArray[np.uint64]:
        """Return the (n,) uint64 addresses of blocks."""
        offsets = np.array(block_ids, dtype=np.uint64) * np.uint64(self.block_bytes)
        return offsets + np.uint64(self.address)
