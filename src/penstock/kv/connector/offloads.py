"""Saves of a device process: from the device into slots, and from there to the tiers that lack the blocks."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence

from penstock.core.ids import BlockId
from penstock.core.log import get_logger
from penstock.core.types.events import Tier
from penstock.core.wire import HashArray
from penstock.kv.connector.loads import Copy
from penstock.kv.connector.orders import SaveOrder
from penstock.kv.connector.staging import Staging
from penstock.seams.kv import KvTier

_PROBE_S = 1.0
"""A tier that is off is offered blocks so often, so that it is tried again."""
_STORING_S = 1.0
"""A piece waits so long for the one before it to be stored; a tier that has not stored it then does without what follows."""
_UNSTAGED = BlockId(-1)
"""In place of the slot of a block that a tier keeps already."""


class Offloads:
    """Saves in the order in which they were asked for, since a tier takes a block after its parent. One event loop owns it."""

    def __init__(
        self,
        tiers: Sequence[KvTier],
        staging: Staging,
        read: Copy,
        *,
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        """Make it without work.

        Args:
            tiers: each gets the blocks that it lacks.
            staging: its slots for saves are used.
            read: copies device blocks to slots.
            on_begin: called when a tier begins to read slots.
            on_end: called when it has ended.
        """
        self._tiers = tiers
        self._slots = staging.saves
        self._read = read
        self._on_begin = on_begin
        self._on_end = on_end
        self._probed_s = -_PROBE_S
        self._turn, self._is_offloaded = asyncio.Lock(), asyncio.Event()
        self._is_offloaded.set()
        self._change = asyncio.Event()
        self._taken: dict[Tier, HashArray] = {}
        """The blocks that each tier took last."""
        self.dropped: Counter[Tier] = Counter()
        """Blocks that each tier did not take, of those that it was offered."""

    async def save(self, order: SaveOrder) -> None:
        """Copy blocks into slots; the tiers go on by themselves when it returns."""
        try:
            async with self._turn:
                await self._save(order)
        except Exception as error:  # noqa: BLE001 - whatever a device or a tier raises, the blocks are not kept
            get_logger().error("kv_save_failed", error=str(error), effect="blocks are not offloaded")

    async def _save(self, order: SaveOrder) -> None:
        hashes, at = order.block_hashes, order.start
        tiers = self._wanted()
        while True:
            at = max(at, min((tier.locate(hashes) for tier in tiers), default=len(hashes)))
            if at >= len(hashes):
                return
            room = min((room for tier in tiers if (room := tier.offload_room)), default=1)
            slots = await self._slots.take(min(len(hashes) - at, room))
            try:
                await self._read(order.block_ids[at - order.start :][: len(slots)], slots)
                await self._is_offloaded.wait()  # the piece before
                await self._wait_for_tiers(tiers, hashes[:at])
            except BaseException:
                self._slots.give_back(slots)
                raise
            self._offload(tiers, hashes[: at + len(slots)], at, slots)
            at += len(slots)

    def changed(self) -> None:
        """Note that a tier has other blocks than before."""
        self._change.set()

    async def _wait_for_tiers(self, tiers: Sequence[KvTier], parents: HashArray) -> None:
        """Wait, for a while, until tiers have room, and keep the piece before that they have taken: they may only have read it."""

        def is_behind(tier: KvTier) -> bool:
            taken = self._taken.get(tier.tier)
            is_storing = (
                taken is not None
                and len(parents) > 0
                and bool((taken == parents[-1]).all(axis=1).any())
                and tier.locate(taken) < len(taken)
            )
            return is_storing or not tier.offload_room

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STORING_S):
                while any(is_behind(tier) for tier in tiers if not tier.is_off):
                    self._change.clear()
                    await self._change.wait()

    def _wanted(self) -> Sequence[KvTier]:
        """Return the tiers that are not off, and now and then all."""
        wanted = [tier for tier in self._tiers if not tier.is_off]
        now_s = asyncio.get_running_loop().time()
        if len(wanted) < len(self._tiers) and now_s - self._probed_s >= _PROBE_S:
            self._probed_s = now_s
            return self._tiers
        return wanted

    def _offload(self, tiers: Sequence[KvTier], hashes: HashArray, start: int, slots: list[BlockId]) -> None:
        """Give staged blocks to the tiers; the slots are given back once all tiers have read them."""
        readers = 1
        self._is_offloaded.clear()

        def release() -> None:
            nonlocal readers
            readers -= 1
            if not readers:
                self._slots.give_back(slots)
                self._is_offloaded.set()

        def done(_: object) -> None:
            release()
            self._on_end()

        try:
            for tier in tiers:
                kept = tier.locate(hashes)
                # where kept < start the blocks between were evicted meanwhile, and are not staged
                read = tier.offload(hashes, [_UNSTAGED] * start + slots, done) if kept >= start else ()
                self.dropped[tier.tier] += len(hashes) - max(kept, start) - len(read)
                if read:
                    readers += 1
                    self._taken[tier.tier] = hashes[[slots.index(slot) + start for slot in read]]
                    self._on_begin()
        finally:
            release()
