"""The host tier: keeps blocks of the device in the machine's memory."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, TransferError
from penstock.core.ids import BlockId
from penstock.core.log import get_logger
from penstock.core.types.events import KvEvent, Tier
from penstock.core.wire import HashArray
from penstock.kv.device_blocks import DeviceBlocks
from penstock.kv.measured import LOAD_HALF_LIFE_S, MeasuredSpeed
from penstock.kv.pool.pool import BlockPool
from penstock.kv.pool.prefixes import block_keys, commit_runs, split_prefix
from penstock.seams.kv import OffloadPolicy
from penstock.transfer.regions.arena import Arena
from penstock.transfer.regions.checksum import checksum_ranges
from penstock.transfer.regions.free_memory import free_memory_bytes
from penstock.transfer.regions.ranges import Stop, copy_ranges

_PIECE_BYTES = 8 << 20
"""Bytes copied, then verified, at a time; a cancelled load ends within one such piece."""
_SPARED_BYTES = 1 << 28
"""Memory that stays free: a host without any kills processes."""


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way; another thread copies until `stop` is set."""

    sources: list[BlockId]
    targets: list[BlockId]
    stop: Stop = field(default_factory=lambda: np.zeros(1, np.uint8))
    seconds: float = 0.0

    def cancel(self, *, is_late: bool = False) -> None:  # noqa: ARG002 - memory is slow where the host is busy
        """Ask it to end soon."""
        self.stop[0] = 1


class HostTier:
    """A `KvTier` in an arena of the host. Each block is stored with its CRC-32C, and verified when it is loaded.

    Its index is a `BlockPool`, in which the block ids are those of the arena. Loads run one after another on one thread, and
    offloads on a second one.
    """

    tier = Tier.HOST
    is_off = False
    offload_policy = OffloadPolicy()

    def __init__(self, device: DeviceBlocks, num_blocks: int, block_size: int) -> None:
        """Allocate the memory; `close` releases it.

        Args:
            device: the engine's blocks.
            num_blocks: blocks to keep.
            block_size: tokens in a block.

        Raises:
            ConfigError: the host has not enough memory.
        """
        self.num_blocks = num_blocks
        self.block_bytes = device.block_bytes
        self.num_corrupt = 0
        self._device = device
        self._arena = _allocate(num_blocks, device.block_bytes)
        self._host = DeviceBlocks(self._arena.address, device.block_bytes, self._arena.array)
        self._sums = np.zeros(num_blocks, np.uint32)
        self._pool = BlockPool(num_blocks, block_size, tier=Tier.HOST)
        self._speed = MeasuredSpeed(half_life_s=LOAD_HALF_LIFE_S)
        self._waiting_blocks = 0  # of loads under way
        self._loads: set[_Load] = set()
        self._storing: set[bytes] = set()
        self._load_thread = ThreadPoolExecutor(1, "kv-host-load")
        self._store_thread = ThreadPoolExecutor(1, "kv-host-offload")
        self._is_closed = False

    @property
    def num_cached(self) -> int:
        """Blocks that it keeps."""
        return self._pool.num_cached

    @property
    def offload_room(self) -> int:
        """Blocks that it can keep: copies within a host are quick."""
        return self.num_blocks

    def start(self, on_change: Callable[[], None]) -> None:
        """Do nothing: it changes by loads and offloads alone."""

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that it keeps."""
        return len(self._pool.match(block_hashes))

    def load_s(self, num_blocks: int) -> float:
        """Predict the seconds until so many blocks are loaded."""
        return self._speed.seconds(self._waiting_blocks + num_blocks)

    def load(self, block_hashes: HashArray, targets: Sequence[BlockId], done: Callable[[int], None]) -> _Load:
        """Copy leading blocks to the device, and verify them."""
        sources = self._pool.match(block_hashes)
        self._pool.acquire(sources)
        load = _Load(sources, list(targets[: len(sources)]))
        self._loads.add(load)
        self._waiting_blocks += len(sources)

        def on_end(future: "asyncio.Future[int]") -> None:
            self._on_loaded(load, future, done)

        asyncio.get_running_loop().run_in_executor(
            self._load_thread, self._copy_to_device, load
        ).add_done_callback(on_end)
        return load

    def offload(
        self, block_hashes: HashArray, block_ids: Sequence[BlockId], done: Callable[[Sequence[BlockId]], None]
    ) -> Sequence[BlockId]:
        """Begin to copy the blocks of a prefix that it does not keep yet from the device."""
        held, new = split_prefix(self._pool, block_hashes, self._storing)
        self._pool.acquire(held)
        new = new[: self._pool.num_available]
        taken = self._pool.allocate(len(new)) if new and not self._is_closed else None
        self._pool.release(held)  # as the newest, and not evicted for their own children
        if not taken:
            return ()
        storing = block_keys(block_hashes[new])
        self._storing.update(storing)
        sources = [block_ids[index] for index in new]

        def on_end(future: "asyncio.Future[None]") -> None:
            self._storing.difference_update(storing)
            if future.exception() is None:
                commit_runs(self._pool, block_hashes, new, taken)
            self._pool.release(taken)
            done(sources)

        asyncio.get_running_loop().run_in_executor(
            self._store_thread, self._copy_from_device, sources, taken
        ).add_done_callback(on_end)
        return sources

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the KV events since the last call, in order."""
        return self._pool.take_events()

    def clear(self) -> None:
        """Forget all blocks."""
        self._pool.reset()

    async def close(self) -> None:
        """End all copies and release the memory. Safe twice."""
        self._is_closed = True
        for load in self._loads:
            load.cancel()
        loop = asyncio.get_running_loop()
        for thread in (self._load_thread, self._store_thread):
            await loop.run_in_executor(None, thread.shutdown)
        await asyncio.sleep(0)  # the callbacks of the last copies run
        self._arena.close()

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        self._pool.check()

    # ---- on the event loop ----------------------------------------------------------------------------

    def _on_loaded(self, load: _Load, future: "asyncio.Future[int]", done: Callable[[int], None]) -> None:
        error = future.exception()
        if error is not None:
            get_logger().error(
                "kv_load_failed", tier=self.tier, error=str(error), effect="blocks are computed"
            )
        loaded = 0 if error is not None else future.result()
        if loaded < len(load.sources) and not load.stop[0] and error is None:
            self.num_corrupt += 1
            self._pool.forget([load.sources[loaded]])
            get_logger().warning(
                "kv_block_corrupt",
                tier=self.tier,
                corrupt=self.num_corrupt,
                effect="the block is dropped, and computed instead",
            )
        if loaded:
            self._speed.measure(loaded, load.seconds)
        self._waiting_blocks -= len(load.sources)
        self._loads.discard(load)
        self._pool.release(load.sources)
        done(loaded)

    # ---- on threads -----------------------------------------------------------------------------------

    def _copy_to_device(self, load: _Load) -> int:
        """Copy and verify one piece after another; returns how many leading blocks are complete."""
        started_s = perf_counter()
        try:
            return self._copy_pieces(load)
        finally:
            load.seconds = perf_counter() - started_s

    def _copy_pieces(self, load: _Load) -> int:
        each = max(1, _PIECE_BYTES // self._device.block_bytes)
        for start in range(0, len(load.sources), each):
            sources = load.sources[start : start + each]
            targets = self._device.addresses(load.targets[start : start + each])
            lengths = np.full(len(sources), self._device.block_bytes, np.uint64)
            if load.stop[0] or not copy_ranges(
                targets, self._host.addresses(sources), lengths, stop=load.stop
            ):
                return start
            wrong = np.flatnonzero(checksum_ranges(targets, lengths) != self._sums[sources])
            if len(wrong):
                return start + int(wrong[0])
        return len(load.sources)

    def _copy_from_device(self, sources: list[BlockId], targets: list[BlockId]) -> None:
        each = max(1, _PIECE_BYTES // self._device.block_bytes)
        for start in range(0, len(sources), each):
            to = targets[start : start + each]
            addresses = self._host.addresses(to)
            lengths: NDArray[np.uint64] = np.full(len(to), self._device.block_bytes, np.uint64)
            copy_ranges(addresses, self._device.addresses(sources[start : start + each]), lengths)
            self._sums[to] = checksum_ranges(addresses, lengths)


def _allocate(num_blocks: int, block_bytes: int) -> Arena:
    """Allocate the memory of all blocks, a part at a time, while the host has enough.

    Raises:
        ConfigError: it has not.
    """
    size_bytes = num_blocks * block_bytes
    what = f"kv.host: {num_blocks:,} blocks of {block_bytes:,} bytes are {size_bytes / 2**30:.2f} GiB"

    def check(lacking_bytes: int) -> None:
        free_bytes = free_memory_bytes()
        if free_bytes < lacking_bytes + _SPARED_BYTES:
            raise ConfigError(
                f"{what}, of which {lacking_bytes / 2**30:.2f} are not allocated yet; the host has {free_bytes / 2**30:.2f} GiB free,"
                f" and {_SPARED_BYTES / 2**30:g} must stay free; set a smaller kv.host"
            )

    try:
        check(size_bytes)
        return Arena.create(size_bytes, before_taking=check)
    except TransferError as error:
        raise ConfigError(f"{what}: {error.message}") from error
