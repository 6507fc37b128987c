"""What hosts and object stores hold: told once, by one of the workers that load it, and counted for all of them.

Each holder has a slot of the index, as a worker has, and the index counts its blocks for each worker that shares it. While
the worker that tells it is lost, the others go on loading from it: what is known stays, until another one's snapshot
replaces it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.core.types.events import SHARED_HOLDER, Holder
from penstock.core.types.instances import KvHolder
from penstock.core.types.load import KvTierCounts
from penstock.router.fleet.index_feeds import IndexFeeds
from penstock.router.index.indexer import Indexer
from penstock.router.workers.event_feeds import EventFeeds
from penstock.router.workers.member import FleetMember

_Key = tuple[Holder, str]


@dataclass(slots=True, eq=False)
class _Shared:
    """A holder with a slot.

    loaders: connected members that load from it, and their feeds; those that were connected first come first.
    off: those of them whose tier is off for now; what it holds does not count for them.
    teller: the one whose events are followed; None while the last one is lost and no other is there.
    """

    key: _Key
    slot: int
    loaders: dict[FleetMember, EventFeeds] = field(default_factory=dict)
    off: set[FleetMember] = field(default_factory=set)
    teller: FleetMember | None = None


class KvHolders:
    """The shared holders of a fleet. One event loop owns it."""

    def __init__(
        self,
        indexer: Indexer,
        feeds: IndexFeeds,
        *,
        take_slot: Callable[[], int],
        free_slot: Callable[[int], None],
    ) -> None:
        """Make it without holders.

        Args:
            indexer: keeps their blocks.
            feeds: follows the workers that tell them.
            take_slot: takes a slot of the index.
            free_slot: gives it back.
        """
        self._indexer = indexer
        self._feeds = feeds
        self._take_slot = take_slot
        self._free_slot = free_slot
        self._shared: dict[_Key, _Shared] = {}
        indexer.on_cleared = self._on_cleared

    def __len__(self) -> int:
        return len(self._shared)

    def holds(self, slot: int) -> bool:
        """Say whether a slot is a holder's."""
        return any(shared.slot == slot for shared in self._shared.values())

    def connected(self, member: FleetMember, feeds: EventFeeds) -> None:
        """Count what a member loads from for it, and follow what nobody tells yet."""
        for holder in _distinct(member.instance.engine.kv_holders):
            key = holder.kind, holder.id
            shared = self._shared.get(key)
            if shared is None:
                shared = self._shared[key] = _Shared(key, self._take_slot())
            self._indexer.expect(shared.slot, max(holder.blocks, self._indexer.expected(shared.slot)))
            shared.loaders[member] = feeds
            if shared.teller is None:
                self._choose_teller(shared)
        self._share(member)

    def lost(self, member: FleetMember) -> None:
        """Count nothing more for a member; what it told another one tells."""
        left = self._of(member)
        for shared in left:
            del shared.loaders[member]
            shared.off.discard(member)
            if shared.teller is member:
                shared.teller = None
                self._choose_teller(shared)
        self._share(member)
        for shared in left:
            if not shared.loaders:
                del self._shared[shared.key]
                self._indexer.leave(shared.slot)
                self._free_slot(shared.slot)

    def note_tiers(self, member: FleetMember, tiers: Sequence[KvTierCounts]) -> None:
        """Take from a member's report which of its tiers are off."""
        is_off = {
            SHARED_HOLDER[counts.tier]: counts.is_off for counts in tiers if counts.tier in SHARED_HOLDER
        }
        has_changed = False
        for shared in self._of(member):
            if is_off.get(shared.key[0], False) != (member in shared.off):
                shared.off ^= {member}
                has_changed = True
        if has_changed:
            self._share(member)

    def check(self) -> None:
        """Raise AssertionError where parts disagree."""
        slots = [shared.slot for shared in self._shared.values()]
        assert len(set(slots)) == len(slots), "holders: each has a slot of its own"
        for key, shared in self._shared.items():
            assert shared.key == key, f"{key}: found by its key"
            assert shared.loaders, f"{key}: nobody loads from it"
            assert shared.teller in shared.loaders, f"{key}: told by nobody who loads from it"
            assert shared.off <= shared.loaders.keys(), f"{key}: off for somebody who does not load from it"

    def _of(self, member: FleetMember) -> list[_Shared]:
        keys = {(holder.kind, holder.id) for holder in member.instance.engine.kv_holders}
        found = [self._shared[key] for key in sorted(keys) if key in self._shared]
        return [shared for shared in found if member in shared.loaders]

    def _share(self, member: FleetMember) -> None:
        """Have the index count for a member what its holders hold."""
        slots = [shared.slot for shared in self._of(member) if member not in shared.off]
        self._indexer.tree.share(member.slot, slots)

    def _choose_teller(self, shared: _Shared) -> None:
        """Follow a member that loads from a holder, best one that is not off."""
        if not shared.loaders:
            return
        shared.teller = min(shared.loaders, key=lambda member: member in shared.off)
        self._feeds.follow(shared.teller, shared.loaders[shared.teller], shared.slot, shared.key[0])

    def _on_cleared(self, slot: int) -> None:
        """Follow another member of a holder whose teller has forgotten what the others keep there."""
        for shared in self._shared.values():
            if shared.slot == slot and shared.teller is not None and len(shared.loaders) > 1:
                teller = shared.teller
                feeds = shared.loaders.pop(teller)
                feeds.remove(shared.key[0])
                self._choose_teller(shared)
                shared.loaders[teller] = feeds  # as the last one to be asked


def _distinct(holders: Sequence[KvHolder]) -> list[KvHolder]:
    """Take one holder of each kind: a worker's events name the kind alone."""
    return list({holder.kind: holder for holder in holders if holder.kind is not Holder.WORKER}.values())
