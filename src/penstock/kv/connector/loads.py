"""Loads of a device process: from a tier into slots, verified there, and on to the device."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from penstock.core.ids import BlockId
from penstock.core.log import get_logger
from penstock.core.wire import HashArray
from penstock.kv.connector.orders import Loaded, LoadOrder, LoadRun
from penstock.kv.connector.runs import leading_runs
from penstock.kv.connector.staging import Staging
from penstock.kv.load_or_compute import late_after_s
from penstock.seams.kv import KvLoad, KvTier

Copy = Callable[[Sequence[int], Sequence[BlockId]], Awaitable[None]]
"""Copies between device blocks and slots; complete when it returns."""


@dataclass(slots=True, eq=False)
class Held:
    """Verified blocks in slots."""

    slots: list[BlockId]


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way."""

    is_stopped: bool = False
    is_late: bool = False
    loads: set[KvLoad] = field(default_factory=set)

    def stop(self, *, is_late: bool = False) -> None:
        """Ask it to end soon."""
        self.is_stopped = True
        self.is_late |= is_late
        for each in self.loads:
            each.cancel(is_late=is_late)


class Loads:
    """Loads under way, by their id. One event loop owns it."""

    def __init__(self, tiers: Sequence[KvTier], staging: Staging, write: Copy) -> None:
        """Make it without loads.

        Args:
            tiers: nearest first.
            staging: its slots for loads are used.
            write: copies slots to the device.
        """
        self._tiers = tiers
        self._slots = staging.loads
        self._write = write
        self._under_way: dict[int, _Load] = {}

    async def load(self, order: LoadOrder) -> Loaded:
        """Load all runs at the same time. What is late or does not match is missing at the end."""
        load = self._under_way[order.load_id] = _Load()
        by_tier = {tier.tier: tier for tier in self._tiers}
        late_s = late_after_s(sum(by_tier[run.tier].load_s(len(run.targets)) for run in order.runs))
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(late_s, lambda: load.stop(is_late=True))
        begun_s = loop.time()

        async def timed(run: LoadRun) -> tuple[int, float]:
            return await self._load_run(load, by_tier[run.tier], run), loop.time() - begun_s

        results = await asyncio.gather(*(timed(run) for run in order.runs))
        deadline.cancel()
        del self._under_way[order.load_id]
        arrived = 0
        for run, (count, _) in zip(order.runs, results, strict=True):
            arrived += count
            if count < len(run.targets):
                break
        targets = [target for run in order.runs for target in run.targets]
        return Loaded(
            order.load_id,
            order.request_id,
            tuple(results),
            missing=tuple(targets[arrived:]),
            is_late=load.is_late,
            is_awaited=order.is_awaited,
        )

    def cancel(self, load_id: int) -> None:
        """Ask a load to end soon, if it is under way."""
        if load_id in self._under_way:
            self._under_way[load_id].stop()

    def cancel_all(self) -> None:
        """Ask all loads to end soon."""
        for load in self._under_way.values():
            load.stop()

    def find(self, block_hashes: HashArray) -> list[tuple[KvTier, int, int]]:
        """Find what the tiers keep of a prefix, nearest first: (tier, first block, block after the last)."""
        return leading_runs(self._tiers, lambda tier, rest: tier.locate(rest), block_hashes)

    async def hold(self, block_hashes: HashArray) -> Held:
        """Load leading blocks into slots, as many as are free now."""
        held = Held(self._slots.take_now(len(block_hashes)))
        runs = self.find(block_hashes[: len(held.slots)])
        load = _Load()
        late_s = late_after_s(sum(tier.load_s(end - start) for tier, start, end in runs))
        deadline = asyncio.get_running_loop().call_later(late_s, lambda: load.stop(is_late=True))
        depth = 0
        try:
            for tier, start, end in runs:
                depth += await self._stage(load, tier, block_hashes[start:end], held.slots[start:end])
                if depth < end:
                    break
        except Exception as error:  # noqa: BLE001 - whatever a tier raises, the blocks are computed
            get_logger().error("kv_load_failed", tier=tier.tier, error=str(error), effect="computed")
        deadline.cancel()
        self._slots.give_back(held.slots[depth:])
        del held.slots[depth:]
        return held

    def drop(self, held: Held) -> None:
        """Give the slots of held blocks back. Safe twice."""
        self._slots.give_back(held.slots)
        held.slots.clear()

    async def _load_run(self, load: _Load, tier: KvTier, run: LoadRun) -> int:
        """Load one tier's blocks, as many at once as there are slots; returns how many leading ones have arrived."""
        at = 0
        while at < len(run.targets) and not load.is_stopped:
            slots = await self._slots.take(len(run.targets) - at)
            try:
                count = await self._stage(load, tier, run.block_hashes[at : at + len(slots)], slots)
                if count and not load.is_stopped:
                    await self._write(run.targets[at : at + count], slots[:count])
                    at += count
            except Exception as error:  # noqa: BLE001 - whatever a device or a tier raises, the blocks are computed
                get_logger().error("kv_load_failed", tier=tier.tier, error=str(error), effect="computed")
                count = 0
            finally:
                self._slots.give_back(slots)
            if count < len(slots):
                break
        return at

    async def _stage(self, load: _Load, tier: KvTier, hashes: HashArray, slots: Sequence[BlockId]) -> int:
        """Load leading blocks into slots; returns how many are complete."""
        held = tier.locate(hashes)
        if not held or load.is_stopped:
            return 0
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        loading = tier.load(hashes[:held], slots[:held], done.set_result)
        load.loads.add(loading)
        try:
            return await done
        finally:
            load.loads.discard(loading)
