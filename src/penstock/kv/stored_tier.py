"""A KV tier over a store of blocks with its own threads or connections: a `SlotFile` on a disk, `ObjectPacks` in an object store."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from penstock.core.errors import DeadlineExceeded
from penstock.core.ids import BlockId
from penstock.core.types.events import KvEvent, Tier
from penstock.core.types.instances import KvHolder
from penstock.core.wire import HashArray
from penstock.kv.breaker import CircuitBreaker
from penstock.kv.device_blocks import DeviceBlocks
from penstock.kv.guarded import BlockStore, GuardedStore
from penstock.kv.measured import MeasuredSpeed

_TIMEOUT_S = 10.0
"""Timeout of an offload. The loader cancels late loads earlier."""
_AHEAD_S = 2.0
"""Offloads under way are at most what the store takes in so many seconds."""
_AHEAD_BLOCKS_MIN = 32
CHUNK_BYTES = 16 << 20
"""Of a load from a disk: some hundred parallel reads of small blocks, and 8 ms at 2 GB/s."""
_SAMPLE_BLOCKS = 64
_SAMPLE_BYTES = 8 << 20
_SAMPLE_S, _SAMPLE_FIRST_S = 30.0, 1.0
"""A speed that was not measured for so long is measured again in the background, so that no request has to try the tier.
At first sooner, since workers that find a store's first packs at one time measure it together."""


class OwnedStore(BlockStore, Protocol):
    """A `BlockStore` of one worker."""

    @property
    def num_cached(self) -> int:
        """Blocks that can be loaded."""
        ...

    @property
    def num_mismatched(self) -> int:
        """Blocks whose bytes did not match their checksum, since it was opened."""
        ...

    @property
    def storing_room(self) -> int:
        """Blocks that `store` would take now."""
        ...

    def probe(self) -> float | None:
        """Measure bytes per second of loads, as `KvTier.probe` does."""
        ...

    def start(self, on_change: Callable[[], None], on_failed: Callable[[Exception], None]) -> None:
        """Begin, on the event loop.

        Args:
            on_change: called when `take_events` may return more without a load or store.
            on_failed: called if it cannot be reached at the start; it goes on trying.
        """
        ...

    def newest(self, count: int) -> HashArray:
        """Give the hashes of up to `count` held blocks to measure loads with: (n, 2) uint64, empty if it knows none."""
        ...

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the KV events since the last call."""
        ...

    def clear(self) -> None:
        """Forget all blocks."""
        ...

    async def close(self) -> None:
        """Close it."""
        ...


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way."""

    task: "asyncio.Task[int]"
    breaker: CircuitBreaker

    def cancel(self, *, is_late: bool = False) -> None:
        """Ask it to end soon; `is_late` counts as a failure of the store."""
        if self.task.done() or self.task.cancelling():
            return
        self.task.cancel()
        attempt = self.breaker.begin() if is_late else None
        if attempt is not None:
            self.breaker.failed(attempt, DeadlineExceeded("blocks took much longer than predicted"))


class StoredTier:
    """A `KvTier` over an `OwnedStore`, which a circuit breaker turns off while it fails or hangs."""

    def __init__(
        self,
        store: OwnedStore,
        tier: Tier,
        device: DeviceBlocks,
        num_blocks: int,
        *,
        shared: KvHolder | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Take over a store, which `close` closes.

        Args:
            store: keeps the blocks.
            tier: where it is, for events.
            device: the engine's blocks.
            num_blocks: how many it can keep.
            shared: the store, where other workers use it too.
            chunk_bytes: of one load, about; enough for all its threads or connections.
        """
        self.shared = shared
        self.tier = tier
        self.num_blocks = num_blocks
        self.block_bytes = device.block_bytes
        self.chunk_blocks = max(chunk_bytes // device.block_bytes, 1)
        self._store = store
        self._device = device
        self._breaker = CircuitBreaker(tier.value)
        self._guarded = GuardedStore(store, self._breaker, timeout_s=_TIMEOUT_S)
        self._speed = MeasuredSpeed()
        self._sample_at_s = 0.0
        self._sample_s = _SAMPLE_FIRST_S  # until the next sample
        self._store_speed = MeasuredSpeed()
        self._on_change: Callable[[], None] = lambda: None
        self._waiting_blocks = 0  # of loads
        self._storing_blocks = 0
        self._tasks: set[asyncio.Task[int]] = set()
        self._is_closed = False

    @property
    def num_cached(self) -> int:
        """Blocks that it keeps, also while it is off."""
        return self._store.num_cached

    @property
    def is_off(self) -> bool:
        """Whether it is not used for now, since its store failed or hung."""
        return not self._breaker.is_on

    @property
    def num_corrupt(self) -> int:
        """Blocks whose bytes did not match their checksum, since start."""
        return self._store.num_mismatched

    @property
    def offload_room(self) -> int:
        """Blocks that `offload` would take now: as many as the store takes in two seconds, none while it is off."""
        if self._is_closed or not self._breaker.lets_through:
            return 0
        ahead = self._store.storing_room
        if self._store_speed.is_known:
            each_s = self._store_speed.seconds(1)
            soon = int(_AHEAD_S / each_s) if each_s else ahead
            ahead = min(ahead, max(soon, _AHEAD_BLOCKS_MIN) - self._storing_blocks)
        return max(ahead, 0)

    def probe(self) -> float | None:
        """Measure bytes per second of loads, without keeping anything."""
        return self._store.probe()

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin; a store that cannot be reached turns it off with one warning."""
        self._on_change = on_change
        self._store.start(self._on_store_change, self._breaker.trip)
        self._sample()

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that it keeps; none while it is off."""
        return self._guarded.locate(block_hashes)

    def load_s(self, num_blocks: int) -> float:
        """Predict the seconds until so many blocks are loaded."""
        self._sample()
        return self._speed.seconds(self._waiting_blocks + num_blocks)

    def load(self, block_hashes: HashArray, targets: Sequence[BlockId], done: Callable[[int], None]) -> _Load:
        """Copy leading blocks to the device, and verify them."""
        started_s = perf_counter()
        self._waiting_blocks += len(targets)
        task = self._begin(self._guarded.load(block_hashes, self._device.views(targets)))

        def on_end(ended: "asyncio.Task[int]") -> None:
            self._waiting_blocks -= len(targets)
            count = _result(ended)
            self._measure(count, started_s)
            done(count)

        task.add_done_callback(on_end)
        return _Load(task, self._breaker)

    def offload(
        self,
        block_hashes: HashArray,
        block_ids: Sequence[BlockId],
        done: Callable[[Sequence[BlockId]], None],
    ) -> Sequence[BlockId]:
        """Begin to store the blocks of a prefix that it does not keep yet."""
        kept = self._store.locate(block_hashes)
        end = min(len(block_ids), kept + self.offload_room)
        read = list(block_ids[kept:end])
        if not read:
            return ()
        parent = int(block_hashes[kept - 1, 0]) if kept else None
        started_s = perf_counter()
        self._storing_blocks += len(read)
        is_copied = False

        def on_copied() -> None:
            nonlocal is_copied
            if not is_copied:
                is_copied = True
                done(read)

        def on_end(ended: "asyncio.Task[int]") -> None:
            self._storing_blocks -= len(read)
            if _result(ended):
                self._store_speed.measure(len(read), perf_counter() - started_s)
            on_copied()
            self._on_store_change()

        views = self._device.views(read)
        store = self._guarded.store(block_hashes[kept:end], views, parent=parent, on_copied=on_copied)
        self._begin(store).add_done_callback(on_end)
        return read

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the KV events since the last call; the first call also returns those of blocks from an earlier run."""
        return self._store.take_events()

    def clear(self) -> None:
        """Forget all blocks; those that are shared with other workers stay theirs."""
        self._store.clear()

    async def close(self) -> None:
        """Cancel all copies and close the store. Safe twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._store.close()

    def _on_store_change(self) -> None:
        if not self._speed.is_known:
            self._sample()
        self._on_change()

    def _measure(self, num_blocks: int, started_s: float) -> None:
        if num_blocks:
            self._speed.measure_overlapping(num_blocks, started_s, perf_counter())
            self._sample_at_s = asyncio.get_running_loop().time() + min(self._sample_s, _SAMPLE_S)

    def _sample(self) -> None:
        """Load a few blocks to nowhere, if the speed of loads was not measured for a while."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._sample_at_s or self._waiting_blocks or self._is_closed or not self._breaker.is_on:
            return
        hashes = self._store.newest(min(_SAMPLE_BLOCKS, max(_SAMPLE_BYTES // self.block_bytes, 1)))
        if not len(hashes):
            return
        self._sample_at_s = now_s + _SAMPLE_S
        started_s = perf_counter()
        nowhere = np.empty((len(hashes), self.block_bytes), np.uint8)

        def on_end(ended: "asyncio.Task[int]") -> None:
            if count := _result(ended):
                self._speed = MeasuredSpeed()  # the ones before are old
                self._measure(count, started_s)
                self._sample_s = min(2 * self._sample_s, _SAMPLE_S)

        self._begin(self._guarded.load(hashes, nowhere)).add_done_callback(on_end)

    def _begin(self, operation: Coroutine[Any, Any, int]) -> "asyncio.Task[int]":
        task = asyncio.get_running_loop().create_task(operation)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _result(task: "asyncio.Task[int]") -> int:
    return 0 if task.cancelled() or task.exception() is not None else task.result()
