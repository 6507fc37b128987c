"""A device process's side: loads into and saves from the engine's KV memory, on threads of its own.

An event loop in a thread owns the tiers. Blocks pass through slots in host memory: tiers know nothing of the device's layout,
and a GPU's blocks are copied by the engine's own library.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from penstock.core.ids import BlockId
from penstock.core.log import get_logger
from penstock.core.types.events import AllBlocksCleared, KvEvent, Tier
from penstock.core.types.load import KvTierCounts
from penstock.core.wire import HashArray
from penstock.kv.connector.loads import Held, Loads
from penstock.kv.connector.offloads import Offloads
from penstock.kv.connector.orders import Loaded, LoadOrder, LoadRun, Orders, Report, SaveOrder
from penstock.kv.connector.staging import STAGING_BYTES, DeviceMemory, Staging
from penstock.seams.kv import KvTier

_CLOSE_S = 15.0
_LOOK_S = 0.5
"""How often tiers are asked for what others have stored, and how quick they are."""
_ORDERED_S = 30.0
"""Without orders for so long, speeds that are known are not measured again."""
_T = TypeVar("_T")


class KvConnectorWorker:
    """Loads, saves and waits. Its methods may be called from any thread but its own."""

    def __init__(
        self,
        make_tiers: Callable[[Staging], Sequence[KvTier]],
        memory: DeviceMemory,
        *,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """Allocate the slots, make the tiers, and start.

        Args:
            make_tiers: makes them over the slots; called on the loop.
            memory: the engine's.
            staging_bytes: of the slots.

        Raises:
            ConfigError: a tier cannot be made.
            TransferError: the host has not enough memory.
        """
        self._memory = memory
        self._copies = ThreadPoolExecutor(1, "kv-copy")
        self._changed = threading.Condition()
        """Guards what other threads read: the next report, and what is under way."""
        self._loaded: list[Loaded] = []
        self._saved: list[int] = []
        self._events: list[KvEvent] = []
        self._counts: tuple[KvTierCounts, ...] = ()
        self._block_load_s: tuple[float, ...] = ()
        self._told_load_s: tuple[float, ...] = ()
        self._under_way = self._awaited = 0
        self._told_busy: bool | None = None
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-connector", daemon=True)
        self._thread.start()
        try:
            self._call(self._open(make_tiers, staging_bytes))
        except BaseException:
            self._stop_loop()
            raise

    # -- with a scheduler's side

    def submit(self, orders: Orders) -> None:
        """Begin what the scheduler's side ordered; returns at once."""
        begun = len(orders.loads) + len(orders.saves) + orders.is_clearing
        if begun or orders.cancelled:
            with self._changed:
                self._under_way += begun
                self._awaited += sum(load.is_awaited for load in orders.loads)
            self._loop.call_soon_threadsafe(self._begin, orders)

    def load(self, order: LoadOrder) -> None:
        """Begin to load blocks; a `Loaded` tells its end."""
        self.submit(Orders(loads=(order,)))

    def save(self, order: SaveOrder) -> None:
        """Begin to copy blocks to the tiers that lack them."""
        self.submit(Orders(saves=(order,)))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no load and no save is under way; returns whether that came true in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way, timeout_s)

    def wait_for_awaited(self, timeout_s: float | None = None) -> bool:
        """Wait until no load that a step waits for is under way; returns whether that came true in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._awaited, timeout_s)

    def take_report(self) -> Report | None:
        """Return what was done since the last report; None if that is nothing."""
        with self._changed:
            is_busy = self._under_way > 0
            has_news = is_busy != self._told_busy or self._block_load_s != self._told_load_s
            if not (self._loaded or self._saved or self._events or has_news):
                return None
            self._told_busy, self._told_load_s = is_busy, self._block_load_s
            report = Report(
                loaded=tuple(self._loaded),
                saved=tuple(self._saved),
                events=tuple(self._events),
                tiers=self._counts,
                shared=tuple(tier.shared for tier in self.tiers),
                block_load_s=self._block_load_s,
                is_busy=is_busy,
            )
            self._loaded, self._saved, self._events = [], [], []
            return report

    # -- for engines that ask, and wait for the answer

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that some tier keeps."""

        async def locate() -> int:
            runs = self._loads.find(block_hashes)
            return runs[-1][2] if runs else 0

        return self._call(locate())

    def load_now(self, block_hashes: HashArray, targets: Sequence[int]) -> int:
        """Load leading blocks from whatever tier keeps them, as long as a load may take; returns how many have arrived.

        Args:
            block_hashes: (n, 2) uint64.
            targets: (n,) device blocks.
        """

        async def load() -> int:
            runs = tuple(
                LoadRun(tier.tier, block_hashes[start:end], list(targets[start:end]))
                for tier, start, end in self._loads.find(block_hashes)
            )
            loaded = await self._loads.load(LoadOrder(0, "", runs))
            self._tell()
            return sum(len(run.targets) for run in runs) - len(loaded.missing)

        with self._asking:
            return self._call(load())

    def hold(self, block_hashes: HashArray) -> Held:
        """Load and verify leading blocks into slots, as many as are free, and wait; `put` cannot find them wrong later."""

        async def hold() -> Held:
            held = await self._loads.hold(block_hashes)
            self._tell()
            return held

        return self._call(hold())

    def put(self, held: Held, targets: Sequence[int]) -> None:
        """Copy leading held blocks to the device, wait, and give the slots back."""

        async def put() -> None:
            try:
                await self._write(list(targets), held.slots[: len(targets)])
            finally:
                self._loads.drop(held)

        self._call(put())

    def drop(self, held: Held) -> None:
        """Give the slots of held blocks back."""
        self._loop.call_soon_threadsafe(lambda: self._loads.drop(held))

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

    async def _open(self, make_tiers: Callable[[Staging], Sequence[KvTier]], staging_bytes: int) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking = threading.Lock()
        self._ordered_s = self._loop.time()
        self._staging = Staging(self._memory.block_bytes, staging_bytes)
        self.tiers = tuple(make_tiers(self._staging))
        self._loads = Loads(self.tiers, self._staging, self._write)
        self._offloads = Offloads(
            self.tiers, self._staging, self._read, on_begin=self._offload_begun, on_end=self._ended
        )
        for tier in self.tiers:
            tier.start(self._tell)
        self._look()

    async def _close(self) -> None:
        self._loads.cancel_all()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S / 2)
        for task in self._tasks:
            task.cancel()
        for tier in self.tiers:
            await tier.close()
        self._staging.close()  # a copy that hangs keeps its memory

    def _begin(self, orders: Orders) -> None:
        self._ordered_s = self._loop.time()
        if orders.is_clearing:
            for tier in self.tiers:
                tier.clear()
                tier.take_events()
            with self._changed:
                self._events.append(AllBlocksCleared())
            self._ended()
        for load_id in orders.cancelled:
            self._loads.cancel(load_id)
        for load in orders.loads:
            self._start(self._load(load))
        for save in orders.saves:
            self._start(self._save(save))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, order: LoadOrder) -> None:
        self._ended(await self._loads.load(order))

    async def _save(self, order: SaveOrder) -> None:
        await self._offloads.save(order)
        self._ended(order.save_id)

    async def _read(self, block_ids: Sequence[int], slots: Sequence[BlockId]) -> None:
        await self._loop.run_in_executor(
            self._copies, self._memory.read, block_ids, self._staging.blocks, slots
        )

    async def _write(self, block_ids: Sequence[int], slots: Sequence[BlockId]) -> None:
        await self._loop.run_in_executor(
            self._copies, self._memory.write, block_ids, self._staging.blocks, slots
        )

    def _offload_begun(self) -> None:
        with self._changed:
            self._under_way += 1

    def _ended(self, ended: Loaded | int | None = None) -> None:
        """Report a load, or a save by its id; None is a tier's part of a save, or a clearing."""
        self._tell()
        with self._changed:
            if isinstance(ended, Loaded):
                self._loaded.append(ended)
                self._awaited -= ended.is_awaited
            elif ended is not None:
                self._saved.append(ended)
            self._under_way -= 1
            self._changed.notify_all()

    def _look(self) -> None:
        self._loop.call_later(_LOOK_S, self._look)
        self._tell()

    def _tell(self) -> None:
        """Take the tiers' events and counts into the next report."""
        self._offloads.changed()
        events = [event for tier in reversed(self.tiers) for event in tier.take_events()]
        counts = tuple(
            KvTierCounts(
                tier=tier.tier,
                total_blocks=tier.num_blocks,
                cached_blocks=tier.num_cached,
                block_bytes=tier.block_bytes,
                is_off=tier.is_off,
                corrupt_blocks=tier.num_corrupt,
                dropped_blocks=self._offloads.dropped[tier.tier],
            )
            for tier in self.tiers
        )
        block_load_s = tuple(map(self._predict, self.tiers, self._block_load_s or (0.0,) * len(self.tiers)))
        with self._changed:
            self._events += events
            self._counts, self._block_load_s = counts, block_load_s

    def _predict(self, tier: KvTier, known_s: float) -> float:
        """Predict the seconds to load a block, besides the loads under way; a host's loads are measured by who orders them.

        A tier that is asked loads samples: in an object store they cost money, so it is not asked while nothing is ordered.
        """
        is_asked = not known_s or self._loop.time() - self._ordered_s < _ORDERED_S
        return tier.load_s(2) - tier.load_s(1) if is_asked and tier.tier is not Tier.HOST else known_s
