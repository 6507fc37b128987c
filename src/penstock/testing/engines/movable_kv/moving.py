"""Reads and writes the KV blocks of engines under test."""

import ctypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.instances import EngineInfo
from penstock.core.wire import HashArray
from penstock.seams import Engine, KvBlocks, KvPartialBlocks
from penstock.testing.engines.case import EngineCase
from penstock.testing.engines.probe import EngineProbe, EngineSetup
from penstock.transfer.regions.buffers import region_of


class MovingEngine(Engine, KvPartialBlocks, Protocol):
    """An engine whose blocks can be pinned, read and written."""


class MovingCase(EngineCase):
    """Makes engines whose blocks can be moved."""

    @asynccontextmanager
    async def moving(self, setup: EngineSetup | None = None) -> AsyncIterator[EngineProbe[MovingEngine]]:
        """Start an engine, as `probe` does."""
        async with self.probe(setup) as probe:
            assert isinstance(probe.engine, KvPartialBlocks), "claims to move KV without KvPartialBlocks"
            yield cast("EngineProbe[MovingEngine]", probe)


def block_bytes(engine: KvBlocks, info: EngineInfo) -> NDArray[np.uint8]:
    """View an engine's KV memory as (blocks, kv_bytes_per_block); no columns for an engine without KV memory."""
    memory = engine.kv_memory()
    if not memory:
        return np.zeros((info.total_blocks, 0), np.uint8)
    ((all_blocks,),) = memory
    region = region_of(all_blocks)
    view = (ctypes.c_uint8 * region.size_bytes).from_address(region.address)
    return np.ctypeslib.as_array(view).reshape(-1, info.kv_bytes_per_block)


def move_blocks(
    source: EngineProbe[MovingEngine], target: EngineProbe[MovingEngine], hashes: HashArray
) -> int:
    """Copy leading blocks that the source has and the target lacks; return how many the target has now."""
    held = target.engine.pin(hashes)
    pinned = source.engine.pin(hashes)
    missing = pinned[len(held) :]
    reserved = target.engine.reserve(len(missing)) or []
    copied = missing[: len(reserved)]
    block_bytes(target.engine, target.info)[reserved] = block_bytes(source.engine, source.info)[copied]
    parent = int(hashes[len(held) - 1, 0]) if held else None
    target.engine.publish(reserved, hashes[len(held) : len(held) + len(reserved)], parent)
    target.engine.unpin([*held, *reserved])
    source.engine.unpin(pinned)
    return len(held) + len(reserved)
