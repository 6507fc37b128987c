"""Host tiers of several workers over one arena, for tests; content follows from the hash, so that any block can be checked."""

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import BlockId
from penstock.core.wire import HashArray
from penstock.kv.device_blocks import DeviceBlocks
from penstock.kv.host.extent import ExtentLayout
from penstock.kv.host.host_tier import HostTier
from penstock.kv.host.memory import HostPart
from penstock.kv.namespace import Namespace
from penstock.kv.pool.use import EvictionPolicy
from penstock.transfer.regions.arena import Arena
from penstock.transfer.storage.slots import RECORD
from tests.support.slots import NAMESPACE, content

BLOCK_SIZE = 4
BLOCK_BYTES = 4096
DEVICE_BLOCKS = 64
SLOTS = 32


class SharedHost:
    """An arena with two extents, and the workers on it."""

    def __init__(self, *, slots: int = SLOTS, block_bytes: int = BLOCK_BYTES, workers: int = 2) -> None:
        self.slots, self.block_bytes = slots, block_bytes
        size = (slots * (block_bytes + 128) + (1 << 18)) // 4096 * 4096
        self.arena = Arena.create(workers * size, prefault=False)
        self.extents = tuple((number * size, size) for number in range(workers))

    def part(self, number: int) -> HostPart:
        return HostPart(
            path=f"/proc/{os.getpid()}/fd/{self.arena.fd}",
            number=number,
            extents=self.extents,
            sharing=2,
            arena="arena",
        )

    def worker(
        self,
        number: int,
        *,
        namespace: Namespace = NAMESPACE,
        slots: int | None = None,
        eviction: EvictionPolicy = "seconds",
    ) -> "HostWorker":
        return HostWorker(self.part(number), slots or self.slots, self.block_bytes, namespace, eviction)

    def extent(self, number: int) -> NDArray[np.uint8]:
        """Return the memory of an extent, writable."""
        offset, size = self.extents[number]
        return self.arena.array[offset : offset + size]

    def clear_record(self, number: int, block_hash: HashArray) -> None:
        """Make the slot of a block with a (1, 2) hash free, as its worker does before it overwrites the bytes."""
        layout = ExtentLayout(self.slots, self.block_bytes)
        records = self.extent(number)[layout.records_offset :][: self.slots * RECORD.itemsize].view(RECORD)
        records[(records["hash"] == block_hash).all(axis=1)] = np.zeros(1, RECORD)


class HostWorker:
    """A device and a host tier below it."""

    def __init__(
        self,
        part: HostPart,
        slots: int,
        block_bytes: int,
        namespace: Namespace = NAMESPACE,
        eviction: EvictionPolicy = "seconds",
    ) -> None:
        self.block_bytes = block_bytes
        self.memory = np.zeros((DEVICE_BLOCKS, block_bytes), np.uint8)
        device = DeviceBlocks(self.memory.ctypes.data, block_bytes, self.memory)
        self.tier = HostTier(device, slots, BLOCK_SIZE, part=part, namespace=namespace, eviction=eviction)

    def kill(self) -> None:
        """Give up its extent as it is, as the kernel does for a killed process."""
        self.tier._memory.close()

    @contextmanager
    def loads_held(self) -> Iterator[None]:
        """Begin no copy of a load meanwhile."""
        go_on = threading.Event()
        self.tier._load_thread.submit(go_on.wait)
        try:
            yield
        finally:
            go_on.set()

    async def offload(self, hashes: HashArray) -> int:
        """Write a prefix's content to the device and offload it; returns how many blocks were read."""
        done: asyncio.Future[Sequence[BlockId]] = asyncio.get_running_loop().create_future()
        self.memory[: len(hashes)] = content(hashes, self.block_bytes)
        read = self.tier.offload(hashes, [BlockId(n) for n in range(len(hashes))], done.set_result)
        if read:
            await done
        return len(read)

    def begin_load(self, hashes: HashArray) -> "asyncio.Future[int]":
        """Begin to load a prefix to the device's last blocks."""
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        targets = [BlockId(DEVICE_BLOCKS - len(hashes) + n) for n in range(len(hashes))]
        self.memory[-len(hashes) :] = 0
        self.tier.load(hashes, targets, done.set_result)
        return done

    def check_loaded(self, hashes: HashArray, count: int) -> None:
        """Check the content of leading blocks of `begin_load`."""
        found = self.memory[-len(hashes) :][:count]
        np.testing.assert_array_equal(found, content(hashes[:count], self.block_bytes))

    async def load(self, hashes: HashArray) -> int:
        """Load a prefix and check what arrived; returns how many blocks did."""
        count = await self.begin_load(hashes)
        self.check_loaded(hashes, count)
        return count
