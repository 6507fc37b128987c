"""Addresses of an engine's device blocks, which tiers copy from and to."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.descriptors import MemoryKind
from penstock.core.errors import ConfigError
from penstock.core.types.kv import BLOCK_FIRST, KvLayout
from penstock.transfer.regions.arena import region_of


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Where a layout in which all layers of a block are contiguous has its blocks.

    Attributes:
        offset_bytes: of block 0 in its region.
        block_bytes: size of a block, and from one to the next.
    """

    offset_bytes: int
    block_bytes: int

    @classmethod
    def of(cls, layout: KvLayout | None) -> "BlockSpan | None":
        """Find it; None for other layouts."""
        if layout is None or len(layout.ranks) != 1 or layout.ranks[0].order != BLOCK_FIRST:
            return None
        rank = layout.ranks[0]
        elements = (
            layout.planes * layout.num_layers * layout.block_size * layout.num_kv_heads * layout.head_dim
        )
        block_bytes = rank.strides_bytes[0] if rank.strides_bytes else elements * layout.element_bytes
        return cls(rank.offset_bytes, block_bytes)

    def offsets(self, block_ids: Sequence[int]) -> NDArray[np.uint64]:
        """Return the (n,) uint64 offsets of blocks in their region."""
        offsets: NDArray[np.uint64] = np.array(block_ids, np.uint64) * np.uint64(self.block_bytes)
        return offsets + np.uint64(self.offset_bytes)


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
        span = BlockSpan.of(layout) if len(regions) == 1 else None
        if span is None:
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
        assert region.size_bytes >= layout.ranks[0].num_blocks * span.block_bytes, (
            "a block is outside of the KV memory"
        )
        return cls(region.address + span.offset_bytes, span.block_bytes, region)

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
