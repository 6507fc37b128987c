"""Worker slots: the index of each worker in all columns, and the worker's condition; data-parallel ranks as workers.

A registration of N ranks is N routing targets `NAME/0` to `NAME/N-1` of one address.
"""

import hashlib
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import WorkerId
from penstock.core.types.instances import Instance
from penstock.router.fleet.member import CONDITIONS, Condition, FleetMember


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


class Ranks:
    """The targets of each registration. One event loop owns it.

    Each target has a slot, a connection, an index entry and loads of its own, like a worker. A registration comes, changes
    and goes with all its targets.
    """

    def __init__(self) -> None:
        """Know no registration."""
        self._ids: dict[WorkerId, tuple[WorkerId, ...]] = {}  # by each target's id

    def put(self, instance: Instance) -> Sequence[Instance]:
        """Take a registration, and give its targets: itself where its engine has one rank."""
        targets = targets_of(instance)
        ids = tuple(target.worker_id for target in targets)
        for worker_id in ids:
            self._ids[worker_id] = ids
        return targets

    def remove(self, worker_id: WorkerId) -> Sequence[WorkerId]:
        """Forget a registration, and give the ids of its targets."""
        ids = self._ids.get(worker_id, (worker_id,))
        for each in ids:
            self._ids.pop(each, None)
        return ids

    def beside(self, worker_ids: Iterable[WorkerId]) -> set[WorkerId]:
        """Give these targets and all others of their registrations."""
        return {each for worker_id in worker_ids for each in self._ids.get(worker_id, (worker_id,))}


def targets_of(instance: Instance) -> tuple[Instance, ...]:
    """Make a registration's targets.

    Prices are of the whole engine, over whose ranks sequences spread: a rank's sequence costs as much as one on each rank.
    """
    count, prices = instance.engine.data_parallel, instance.prices
    if count <= 1:
        return (instance,)
    if prices is not None:
        prices = msgspec.structs.replace(
            prices,
            decode_sequence_s=count * prices.decode_sequence_s,
            decode_token_s=count * prices.decode_token_s,
        )
    return tuple(
        msgspec.structs.replace(
            instance,
            worker_id=_id_of(instance.worker_id, rank),
            name=f"{instance.name}/{rank}",
            prices=prices,
            rank=rank,
            registered_id=instance.worker_id,
        )
        for rank in range(count)
    )


def _id_of(worker_id: WorkerId, rank: int) -> WorkerId:
    """Give a rank's id: that of the registration for rank 0, else one with bit 62 set, equal in all routers."""
    if not rank:
        return worker_id
    digest = hashlib.blake2b(f"{worker_id}/{rank}".encode(), digest_size=8).digest()
    return WorkerId(int.from_bytes(digest, "little") >> 2 | 1 << 62)
