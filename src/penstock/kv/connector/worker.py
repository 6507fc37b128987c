"""A device process's side: loads into and saves from the engine's KV memory, on threads of its own.

An event loop in a thread owns the tiers. Blocks pass through slots in host memory: tiers know nothing of the device's layout,
and a GPU's blocks are copied by the engine's own library.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.core.ids import BlockId
from penstock.core.log import get_logger
from penstock.core.types.events import KvEvent
from penstock.core.types.load import KvTierCounts
from penstock.core.wire import HashArray
from penstock.kv.connector.orders import Loaded, LoadOrder, LoadRun, Orders, Report, SaveOrder
from penstock.kv.connector.staging import DeviceMemory, Staging
from penstock.kv.manager.worth import late_after_s
from penstock.seams.kv import KvLoad, KvTier

_CLOSE_S = 15.0
_PROBE_S = 1.0
"""A tier that is off is offered blocks so often, so that it is tried again."""
_UNSTAGED = BlockId(-1)
"""For blocks that a tier has already; an address cannot be made of it."""
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way."""

    order: LoadOrder
    is_stopped: bool = False
    is_late: bool = False
    loads: set[KvLoad] = field(default_factory=set)

    def stop(self, *, is_late: bool = False) -> None:
        """Ask it to end soon."""
        self.is_stopped = True
        self.is_late |= is_late
        for each in self.loads:
            each.cancel(is_late=is_late)


class KvConnectorWorker:
    """Loads, saves and waits. Its methods may be called from any thread but its own."""

    def __init__(
        self, make_tiers: Callable[[Staging], Sequence[KvTier]], memory: DeviceMemory, *, name: str = "kv"
    ) -> None:
        """Allocate the slots, make the tiers, and start.

        Args:
            make_tiers: makes them over the slots; called on the loop.
            memory: the engine's.
            name: of the threads.

        Raises:
            ConfigError: a tier cannot be made.
            TransferError: the host has not enough memory.
        """
        self._memory = memory
        self._copies = ThreadPoolExecutor(1, f"{name}-copy")
        self._loads: dict[int, _Load] = {}
        self._probed_s = -_PROBE_S
        self._lock = threading.Condition()
        """Guards what other threads read: the next report, and what is under way."""
        self._loaded: list[Loaded] = []
        self._saved: list[int] = []
        self._events: list[KvEvent] = []
        self._counts: tuple[KvTierCounts, ...] = ()
        self._under_way = 0
        self._told_busy: bool | None = None
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name}-loop", daemon=True)
        self._thread.start()
        try:
            self.tiers = self._call(self._open(make_tiers))
        except BaseException:
            self._stop_loop()
            raise

    # -- from other threads

    def submit(self, orders: Orders) -> None:
        """Begin what the scheduler's side ordered; returns at once."""
        if not orders.loads and not orders.saves and not orders.cancelled and not orders.is_clearing:
            return
        with self._lock:
            self._under_way += len(orders.loads) + len(orders.saves) + orders.is_clearing
        self._loop.call_soon_threadsafe(self._begin, orders)

    def load(self, order: LoadOrder) -> None:
        """Begin to load blocks; a `Loaded` tells its end."""
        self.submit(Orders(loads=(order,)))

    def save(self, order: SaveOrder) -> None:
        """Begin to copy blocks to the tiers that lack them."""
        self.submit(Orders(saves=(order,)))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no load and no save is under way; returns whether that came true in time."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._under_way, timeout_s)

    def take_report(self) -> Report | None:
        """Return what was done since the last report; None if that is nothing."""
        with self._lock:
            is_busy = self._under_way > 0
            if not (self._loaded or self._saved or self._events or is_busy != self._told_busy):
                return None
            self._told_busy = is_busy
            report = Report(
                tuple(self._loaded), tuple(self._saved), tuple(self._events), self._counts, is_busy
            )
            self._loaded, self._saved, self._events = [], [], []
            return report

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that some tier keeps; waits for the loop."""

        async def locate() -> int:
            depth = 0
            while depth < len(block_hashes):
                found = max(tier.locate(block_hashes[depth:]) for tier in self.tiers)
                if not found:
                    break
                depth += found
            return depth

        return self._call(locate())

    def close(self) -> None:
        """End all copies, and close the tiers. Safe twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._call(self._close(), _CLOSE_S)
        except TimeoutError:
            get_logger().error("kv_connector_hangs", waited_s=_CLOSE_S)
        self._stop_loop()

    def _call(self, work: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        self._copies.shutdown(wait=False)
        if not self._thread.is_alive():
            self._loop.close()

    # -- on the loop

    async def _open(self, make_tiers: Callable[[Staging], Sequence[KvTier]]) -> tuple[KvTier, ...]:
        self._tasks: set[asyncio.Task[None]] = set()
        self._saving, self._offloaded = asyncio.Lock(), asyncio.Event()
        self._offloaded.set()
        self._staging = Staging(self._memory.block_bytes)
        self.tiers = tuple(make_tiers(self._staging))
        for tier in self.tiers:
            tier.start(self._tell)
        self._tell()
        return self.tiers

    async def _close(self) -> None:
        for load in self._loads.values():
            load.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S / 2)
        for tier in self.tiers:
            await tier.close()
        self._staging.close()

    def _begin(self, orders: Orders) -> None:
        if orders.is_clearing:
            for tier in self.tiers:
                tier.clear()
            self._ended()
        for load_id in orders.cancelled:
            if load_id in self._loads:
                self._loads[load_id].stop()
        for load in orders.loads:
            self._loads[load.load_id] = _Load(load)
            self._start(self._load(self._loads[load.load_id]))
        for save in orders.saves:
            self._start(self._save(save))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, load: _Load) -> None:
        runs = load.order.runs
        by_tier = {tier.tier: tier for tier in self.tiers}
        late_s = late_after_s(sum(by_tier[run.tier].load_s(len(run.targets)) for run in runs))
        deadline = self._loop.call_later(late_s, lambda: load.stop(is_late=True))
        begun_s = self._loop.time()

        async def timed(run: LoadRun) -> tuple[int, float]:
            return await self._load_run(load, by_tier[run.tier], run), self._loop.time() - begun_s

        results = await asyncio.gather(*(timed(run) for run in runs))
        deadline.cancel()
        order = load.order
        del self._loads[order.load_id]
        targets = [target for run in runs for target in run.targets]
        arrived = _arrived(runs, results)
        self._ended(
            Loaded(order.load_id, order.request_id, tuple(results), tuple(targets[arrived:]), load.is_late)
        )

    async def _load_run(self, load: _Load, tier: KvTier, run: LoadRun) -> int:
        """Load one tier's blocks, as many at once as there are slots; returns how many leading ones have arrived."""
        at = 0
        while at < len(run.targets) and not load.is_stopped:
            slots = await self._staging.loads.take(len(run.targets) - at)
            try:
                count = await self._load_piece(load, tier, run.block_hashes[at : at + len(slots)], slots)
                targets = run.targets[at : at + count]
                if count and not load.is_stopped:
                    await self._copy(self._memory.write, targets, slots[:count])
                    at += count
            except Exception as error:  # noqa: BLE001 - whatever a device or a tier raises, the blocks are computed
                get_logger().error("kv_load_failed", tier=tier.tier, error=str(error), effect="computed")
                count = 0
            finally:
                self._staging.loads.give_back(slots)
            if count < len(slots):
                break
        return at

    async def _load_piece(self, load: _Load, tier: KvTier, hashes: HashArray, slots: list[BlockId]) -> int:
        held = tier.locate(hashes)
        if not held or load.is_stopped:
            return 0
        done: asyncio.Future[int] = self._loop.create_future()
        loading = tier.load(hashes[:held], slots[:held], done.set_result)
        load.loads.add(loading)
        try:
            return await done
        finally:
            load.loads.discard(loading)

    async def _save(self, order: SaveOrder) -> None:
        try:
            async with self._saving:  # a tier takes a block after its parent
                await self._save_pieces(order)
        except Exception as error:  # noqa: BLE001 - likewise: they are not kept
            get_logger().error("kv_save_failed", error=str(error), effect="blocks are not offloaded")
        self._ended(order.save_id)

    async def _save_pieces(self, order: SaveOrder) -> None:
        hashes, at = order.block_hashes, order.start
        wanted = [tier for tier in self.tiers if not tier.is_off]
        if len(wanted) < len(self.tiers) and self._loop.time() - self._probed_s >= _PROBE_S:
            self._probed_s = self._loop.time()
            wanted = list(self.tiers)
        while True:
            at = max(at, min((tier.locate(hashes) for tier in wanted), default=len(hashes)))
            if at >= len(hashes):
                return
            slots = await self._staging.saves.take(len(hashes) - at)
            try:
                block_ids = order.block_ids[at - order.start : at - order.start + len(slots)]
                await self._copy(self._memory.read, block_ids, slots)
            except BaseException:
                self._staging.saves.give_back(slots)
                raise
            await self._offloaded.wait()  # of the piece before
            self._offload(wanted, hashes[: at + len(slots)], at, slots)
            at += len(slots)

    def _offload(self, tiers: Sequence[KvTier], hashes: HashArray, start: int, slots: list[BlockId]) -> None:
        """Give staged blocks to the tiers; the slots are given back once all tiers have read them."""
        readers = 1
        self._offloaded.clear()

        def release(_: object = None) -> None:
            nonlocal readers
            readers -= 1
            if not readers:
                self._staging.saves.give_back(slots)
                self._offloaded.set()

        def done(read: object) -> None:
            release(read)
            self._ended()

        for tier in tiers:
            if tier.locate(hashes) < start:
                continue  # the blocks between were evicted meanwhile, and are not staged
            if tier.offload(hashes, [_UNSTAGED] * start + slots, done):
                readers += 1
                with self._lock:
                    self._under_way += 1
        release()

    async def _copy(
        self, copy: Callable[..., None], block_ids: Sequence[int], slot_ids: Sequence[int]
    ) -> None:
        await self._loop.run_in_executor(
            self._copies, copy, list(block_ids), self._staging.blocks, list(slot_ids)
        )

    def _ended(self, ended: Loaded | int | None = None) -> None:
        """Report a load, or a save by its id; None is a tier's part of a save, or a clearing."""
        self._tell()
        with self._lock:
            if isinstance(ended, Loaded):
                self._loaded.append(ended)
            elif ended is not None:
                self._saved.append(ended)
            self._under_way -= 1
            self._lock.notify_all()

    def _tell(self) -> None:
        """Take the tiers' events and counts into the next report."""
        events = [event for tier in reversed(self.tiers) for event in tier.take_events()]
        counts = tuple(
            KvTierCounts(
                tier=tier.tier,
                total_blocks=tier.num_blocks,
                cached_blocks=tier.num_cached,
                block_bytes=tier.block_bytes,
                is_off=tier.is_off,
                corrupt_blocks=tier.num_corrupt,
            )
            for tier in self.tiers
        )
        with self._lock:
            self._events += events
            self._counts = counts


def _arrived(runs: Sequence[LoadRun], results: Sequence[tuple[int, float]]) -> int:
    """Count the leading blocks of all runs that have arrived."""
    total = 0
    for run, (count, _) in zip(runs, results, strict=True):
        total += count
        if count < len(run.targets):
            break
    return total
