"""Worker slots: the index of each worker in all columns, and the worker's condition."""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from penstock.router.workers.member import CONDITIONS, Condition, FleetMember


class WorkerSlots:
    """Which member has which slot; the lowest free slot is taken first. One event loop owns it.

    worker_ids: (num_slots,) int64, the worker in each slot, 0 where it is free; for reading
    conditions: (num_slots,) uint8, indices of `CONDITIONS`; for reading
    """

    def __init__(self) -> None:
        self._members: list[FleetMember | None] = []
        self._free: list[int] = []  # heap
        self._shared: set[int] = set()  # taken for what workers share
        self._now: tuple[FleetMember | None, ...] | None = None
        self._conditions_now: NDArray[np.uint8] | None = None
        self._ids = np.zeros(0, dtype=np.int64)
        self._conditions = np.zeros(0, dtype=np.uint8)
        self.grow(1)

    def next_slot(self) -> int:
        """Give the lowest free slot, for `put`. It may lie just past the columns, which then have to `grow`."""
        if self._free:
            return heappop(self._free)
        self._members.append(None)
        return len(self._members) - 1

    def put_shared(self, slot: int) -> None:
        """Keep a slot that `next_slot` gave for a host or an object store that workers share."""
        self._shared.add(slot)

    def leave_shared(self, slot: int) -> None:
        """Free a slot of `put_shared`."""
        self._shared.remove(slot)
        heappush(self._free, slot)

    def grow(self, num_slots: int) -> None:
        """Have this many slots."""
        more = (0, num_slots - len(self._ids))
        self._ids, self._conditions = np.pad(self._ids, more), np.pad(self._conditions, more)
        self._conditions_now = None
        self.worker_ids, self.conditions = self._ids.view(), self._conditions.view()
        self.worker_ids.flags.writeable = self.conditions.flags.writeable = False

    def put(self, member: FleetMember) -> None:
        """Put a member into its slot."""
        self._members[member.slot] = member
        self._ids[member.slot] = member.worker_id
        self._now = None

    def leave(self, member: FleetMember) -> None:
        """Free a member's slot."""
        self._members[member.slot] = None
        self._ids[member.slot] = 0
        heappush(self._free, member.slot)
        self._now = None

    def note(self, member: FleetMember, condition: Condition | None) -> None:
        """Write a member's condition into its column."""
        self._conditions[member.slot] = CONDITIONS.index(condition)
        self._conditions_now = None

    def at(self, slot: int) -> FleetMember:
        """Give the member in a slot that is taken."""
        member = self._members[slot]
        assert member is not None, f"slot {slot} is free"
        return member

    def get(self, slot: int) -> FleetMember | None:
        """Give the member in a slot, None where it is free."""
        return self._members[slot]

    def now(self) -> tuple[FleetMember | None, ...]:
        """Give the members by slot as of now; the tuple does not change."""
        if self._now is None:
            self._now = tuple(self._members)
        return self._now

    def conditions_now(self) -> NDArray[np.uint8]:
        """Give the conditions as of now; the column does not change."""
        if self._conditions_now is None:
            self._conditions_now = self._conditions.copy()
        return self._conditions_now

    def check(self) -> None:
        """Raise AssertionError where parts disagree."""
        assert self.now() == tuple(self._members), "members now"
        assert np.array_equal(self.conditions_now(), self._conditions), "conditions now"
        free = [n for n, member in enumerate(self._members) if member is None and n not in self._shared]
        assert sorted(self._free) == free, "free"
        for slot, member in enumerate(self._members):
            if member is None:
                assert not self.worker_ids[slot], f"free slot {slot} has a worker's id"
                assert not self.conditions[slot], f"free slot {slot} has a condition"
                continue
            assert member.slot == slot, f"slot {slot}: its member thinks it is in {member.slot}"
            assert self.worker_ids[slot] == member.worker_id, f"slot {slot}: its worker's id"
            assert CONDITIONS[self.conditions[slot]] is member.noted, f"slot {slot}: its worker's condition"
