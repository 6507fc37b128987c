"""Running requests whose prefix comes from tiers below the device: they hold a slot and blocks, and compute once it is there."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import BlockId
from penstock.core.types.load import KvTierCounts
from penstock.engine.scheduling.sequences import SequenceLimits
from penstock.engine.scheduling.slots import Int32s, Slots
from penstock.kv.loader import Arrival
from penstock.kv.manager import KvManager


class Loading:
    """The slots of one scheduler that wait for lower tiers. Without such tiers nothing ever waits."""

    def __init__(self, kv: KvManager | None, slots: Slots, limits: SequenceLimits) -> None:
        self._kv = kv
        self._slots = slots
        self._limits = limits
        self._unstepped: set[int] = set()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt tokens found in each lower `Tier`, host first; empty without tiers."""
        return () if self._kv is None else self._kv.tokens

    @property
    def counts(self) -> tuple[KvTierCounts, ...]:
        """What each tier keeps, and has done since start; empty without tiers."""
        return () if self._kv is None else self._kv.counts

    def is_loading(self, slots: Int32s) -> NDArray[np.bool_]:
        """Mask the slots whose prefix is still being loaded."""
        if self._kv is None:
            return np.zeros(len(slots), dtype=np.bool_)
        is_under_way, ids = self._kv.is_under_way, self._slots.request_ids
        return np.array([is_under_way(ids[slot]) for slot in slots.tolist()], dtype=np.bool_)

    def prompts_left(self) -> list[tuple[int, int]]:
        """List what is left to compute of running prompts once their prefixes are loaded, as (tokens, tokens before them)."""
        table, slots = self._slots.table, self._slots.running_array()
        loaded = table.num_blocks[slots] * self._limits.block_size
        computed = np.where(self.is_loading(slots), loaded, table.num_computed[slots])
        left = table.num_tokens[slots] - computed
        return list(zip(left[left > 1].tolist(), computed[left > 1].tolist(), strict=True))

    def is_unstepped(self, slots: Int32s) -> NDArray[np.bool_]:
        """Mask the slots whose prefix was loaded and that no step has computed since: their first step is a prefill row."""
        if not self._unstepped:
            return np.zeros(len(slots), dtype=np.bool_)
        return np.isin(slots, list(self._unstepped))

    def step(self, slots: Int32s) -> None:
        """Tell which slots the next step computes."""
        if self._unstepped:
            self._unstepped.difference_update(slots.tolist())

    def count_offloading(self, *others: Callable[[], Mapping[BlockId, int]]) -> int:
        """Count the device blocks that are held for an offload alone, by no running request and none of the other holders."""
        held = set() if self._kv is None else set(self._kv.offloading())
        if held:
            for holders in (self._slots.holders, *others):
                held.difference_update(holders())
        return len(held)

    def begin_again(self, slot: int) -> None:
        """Tell of a slot that was given again to a request whose load has failed."""
        self._unstepped.add(slot)

    def take_arrived(self, waiting: Callable[[Arrival], None]) -> tuple[list[int], int, list[int]]:
        """Count what was loaded as computed, also of loads that go on.

        Args:
            waiting: called with what has arrived of requests that still wait.

        Returns:
            the slots of which more was loaded since the last call, the tokens that loads which have ended did not bring, and
            the slots whose load is of no use, in a model with several groups of layers: they need all of it.
        """
        arrived: list[int] = []
        failed: list[int] = []
        lacking = 0
        if self._kv is None:
            return arrived, lacking, failed
        slot_of = {self._slots.request_ids[slot]: slot for slot in self._slots.running}
        table, size = self._slots.table, self._limits.block_size
        for arrival in self._kv.take_arrived():
            slot = slot_of.get(arrival.request_id)
            if slot is None:
                waiting(arrival)
                continue
            if self._slots.tables is not None:
                num_lower = int(table.num_blocks[slot] - self._slots.num_published[slot])
                if arrival.num_blocks < num_lower + self._slots.tables.num_blocks(slot):
                    failed.append(slot)
                    continue
                table.num_computed[slot] = table.num_blocks[slot] * size
            else:
                start = int(table.num_computed[slot]) // size
                table.block_tables[slot, start : start + arrival.num_blocks] = arrival.block_ids
                table.num_computed[slot] += arrival.num_blocks * size
            arrived.append(slot)
            if not arrival.is_over:
                continue
            expected = int(table.num_blocks[slot]) * size
            lacking += expected - int(table.num_computed[slot])
            sequence = self._slots.sequence(slot)
            if sequence.cached_tokens is not None:
                sequence.cached_tokens = min(sequence.cached_tokens, int(table.num_computed[slot]))
            self._unstepped.add(slot)
        return arrived, lacking, failed

    def leave(self, slot: int, *, offloads: bool) -> None:
        """Cancel the load of a slot that is about to be freed, and offload its full blocks if it `offloads`."""
        if self._kv is None:
            return
        self._unstepped.discard(slot)
        self._kv.cancel(self._slots.request_ids[slot])
        count = int(self._slots.num_published[slot])
        if count and offloads:
            hashes, tables = self._slots.sequence(slot).block_hashes[:count], self._slots.tables
            self._kv.offload(hashes, [] if tables is None else list(tables.kept(slot, hashes)))
