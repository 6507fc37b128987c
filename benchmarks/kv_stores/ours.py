"""The host tier and the slot file with the blocks of a device in memory, and memcpy over the same blocks."""

import asyncio
import ctypes
import mmap
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from penstock.core.ids import BlockId
from penstock.core.wire import HashArray
from penstock.kv.device_blocks import DeviceBlocks
from penstock.kv.disk.slot_file import SlotFile
from penstock.kv.host.host_tier import HostTier
from penstock.kv.namespace import Namespace
from penstock.transfer.storage.slots import ALIGNMENT, RECORD, SUFFIX, Records, seal

_BLOCK_SIZE = 16
_ROOM = 2
"""A tier keeps so many times the blocks of a round, so that rounds evict those of earlier ones."""
_NAMESPACE = Namespace(model_digest="bench", dtype="uint8", layout="bytes", block_size=_BLOCK_SIZE)


def _device(block_bytes: int, count: int) -> DeviceBlocks:
    """Make device blocks of random bytes, in memory that begins with a page as that of engines does."""
    memory = np.frombuffer(mmap.mmap(-1, count * block_bytes), np.uint8)
    memory[:] = np.random.default_rng(0).integers(0, 256, count * block_bytes, dtype=np.uint8)
    return DeviceBlocks(memory.ctypes.data, block_bytes, memory)


def _hashes(seed: int, count: int) -> HashArray:
    """Name (count, 2) uint64 blocks that no other seed names."""
    return np.random.default_rng([1, seed]).integers(1, 1 << 63, (count, 2), dtype=np.uint64)


def _order(seed: int, count: int) -> list[BlockId]:
    return [BlockId(index) for index in np.random.default_rng([2, seed]).permutation(count).tolist()]


class OurHost:
    """A `HostTier`; an async context manager."""

    def __init__(self, block_bytes: int, count: int) -> None:
        self._device = _device(block_bytes, count)
        self._count = count

    async def __aenter__(self) -> Self:
        self._tier = HostTier(self._device, _ROOM * self._count, _BLOCK_SIZE)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tier.close()

    async def measure(self, seed: int) -> dict[str, float]:
        """Offload all blocks, and load them into other ones."""
        loop, hashes = asyncio.get_running_loop(), _hashes(seed, self._count)
        stored: asyncio.Future[None] = loop.create_future()
        began_s = time.perf_counter()
        read = self._tier.offload(hashes, _order(seed, self._count), lambda _: stored.set_result(None))
        assert len(read) == self._count, "some were there"
        await stored
        stored_s = time.perf_counter()
        loaded: asyncio.Future[int] = loop.create_future()
        self._tier.load(hashes, _order(seed + 1, self._count), loaded.set_result)
        assert await loaded == self._count, "a block is missing"
        return {"store": stored_s - began_s, "load": time.perf_counter() - stored_s}


class OurDisk:
    """A `SlotFile`; an async context manager."""

    def __init__(self, path: Path, block_bytes: int, count: int) -> None:
        self._path = path
        self._device = _device(block_bytes, count)
        self._count = count

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            size_bytes = _ROOM * self._count * self._device.block_bytes
            self._file = SlotFile(
                self._path, size_bytes, self._device.block_bytes, _NAMESPACE, storing_max=self._count
            )
            stack.push_async_callback(self._file.close)
            assert self._file.is_direct, (
                f"{self._path}: no O_DIRECT here; name another directory by --storage"
            )
            stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._file.close()

    async def measure(self, seed: int) -> dict[str, float]:
        """Store all blocks, and load them into other ones."""
        hashes = _hashes(seed, self._count)
        began_s = time.perf_counter()
        stored = await self._file.store(hashes, self._device.views(_order(seed, self._count)))
        assert stored == self._count, "a block was refused"
        stored_s = time.perf_counter()
        loaded = await self._file.load(hashes, self._device.views(_order(seed + 1, self._count)))
        assert loaded == self._count, "a block is missing"
        return {"store": stored_s - began_s, "load": time.perf_counter() - stored_s}


class Memcpy:
    """One thread's memcpy of the same blocks in the same orders, without checksums."""

    def __init__(self, block_bytes: int, count: int) -> None:
        self._device, self._other = _device(block_bytes, count), _device(block_bytes, _ROOM * count)
        self._count = count

    async def measure(self, seed: int) -> dict[str, float]:
        """Copy all blocks to other memory and back."""
        seconds = {}
        for way, order in (("store", _order(seed, self._count)), ("load", _order(seed + 1, self._count))):
            device = self._device.addresses(order).tolist()
            first = seed // 2 % _ROOM * self._count
            other = self._other.addresses(range(first, first + self._count)).tolist()
            pairs = zip(other, device, strict=True) if way == "store" else zip(device, other, strict=True)
            began_s = time.perf_counter()
            for target, source in pairs:
                ctypes.memmove(target, source, self._device.block_bytes)
            seconds[way] = time.perf_counter() - began_s
        return seconds


_OPENED_NAMESPACE = Namespace(model_digest="bench", dtype="uint8", layout="bytes", block_size=16)
_CHAIN_BLOCKS = 64
_RECORDS_AT = 4096
"""The first record comes after a page."""


def opening_s(directory: Path, num_slots: int) -> float:
    """Make a slot file that is full by its records, and return the seconds until it is open again.

    Blocks are of 4 KiB, in chains of 64. Their bytes are never written: opening reads records alone.
    """
    path = directory / "full"
    size_bytes = num_slots * ALIGNMENT

    async def open_and_close(expected: int) -> float:
        began_s = time.perf_counter()
        slots = SlotFile(path, size_bytes, ALIGNMENT, _OPENED_NAMESPACE)
        opened_s = time.perf_counter() - began_s
        kept = slots.num_cached
        await slots.close()
        assert kept == expected, f"{kept} of {expected} records were trusted"
        return opened_s

    asyncio.run(open_and_close(0))
    with path.with_name(path.name + SUFFIX).open("r+b") as file:
        file.seek(_RECORDS_AT)
        file.write(_records(num_slots).tobytes())
    seconds = asyncio.run(open_and_close(num_slots))
    path.unlink()
    return seconds


def _records(num_slots: int) -> Records:
    records = np.zeros(num_slots, RECORD)
    records["hash"] = np.random.default_rng(3).integers(1, 1 << 63, (num_slots, 2), dtype=np.uint64)
    records["namespace"] = np.frombuffer(_OPENED_NAMESPACE.digest, "<u8")
    records["generation"] = np.arange(num_slots, 0, -1)
    records["parent"][1:] = records["hash"][:-1, 0]
    records["parent"][::_CHAIN_BLOCKS] = 0
    records["length"] = ALIGNMENT
    records["slot"] = np.arange(1, num_slots + 1)
    seal(records)
    return records
