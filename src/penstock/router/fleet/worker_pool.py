"""A model's workers, and which of them may get a request now.

Discovery may list workers of one model whose cards differ, as while a new version rolls out. Those whose blocks
are named otherwise must not share requests: one card rules, and whoever differs waits until the others are gone.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.core.log import get_logger
from penstock.core.types.cards import ModelCard
from penstock.core.types.instances import Instance, InstanceState, Role
from penstock.perf.topology import Way
from penstock.router.links.kv_transfer_pairs import KvTransferPairs
from penstock.router.workers.member import Member, identity
from penstock.router.workers.price_table import PriceTable
from penstock.router.workers.traffic import Traffic

T = TypeVar("T")

_log = get_logger()


@dataclass(frozen=True, slots=True)
class _Noted:
    """How a member is counted. Who leaves soon has no say in the card while others stay."""

    card: ModelCard
    is_staying: bool
    adapters: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Ballot:
    """How many members have each card: of all, and of those that stay."""

    of_all: Counter[ModelCard] = field(default_factory=Counter)
    of_staying: Counter[ModelCard] = field(default_factory=Counter)
    staying: int = 0

    def count(self, noted: _Noted, change: int) -> None:
        _count(self.of_all, noted.card, change)
        if noted.is_staying:
            _count(self.of_staying, noted.card, change)
            self.staying += change

    def has(self, card: ModelCard) -> bool:
        return card in (self.of_staying if self.staying else self.of_all)


class WorkerPool:
    """The workers of one model. A change costs O(1), but where the ruling card has to be chosen anew.

    One event loop owns it. `ready` (num_slots,) is True for those that may get requests, `ready_prefill` for those that
    may get prompts alone, to be handed over: views that cannot be written to.
    """

    def __init__(self, first: Member, num_slots: int, adapters_max: int) -> None:
        """Make a pool under the card of its first worker, which has yet to be `put`; it knows so many adapters."""
        self.card = first.instance.card
        self._adapters_max = adapters_max
        self._holders: dict[str, NDArray[np.bool_]] = {}
        self._ready_holders: Counter[str] = Counter()  # by adapter, of those that are ready; no zeros
        self._adapters: dict[int, tuple[str, ...]] = {}  # by slot, those of its worker that are known
        self._adapter_cards: Mapping[str, ModelCard] | None = None  # as of the last change
        self._adapted = self.card  # what they were made from
        self._whole = _Ready(num_slots)
        self._prefill = _Ready(num_slots)
        self._roles: dict[int, Role] = {}  # by slot
        self.pairs = KvTransferPairs()
        self.prices = PriceTable(num_slots)
        self.traffic = Traffic()
        self._members: dict[Member, _Noted] = {}
        self._ballot = _Ballot()
        self._unanswered_since_s: float | None = None

    def __len__(self) -> int:
        return len(self._members)

    def put(self, member: Member, way: Way | None = None) -> Sequence[Member]:
        """Take in a worker, or what discovery says anew about one.

        Args:
            member: the worker.
            way: what lies between it and this router; None is nothing.

        Returns:
            Those whose `matching` may have changed.
        """
        old = self._members.get(member)
        if old is not None:
            self._ballot.count(old, -1)
            self._drop_adapters(member.slot)
        instance = member.instance
        if self._roles.get(member.slot) is not instance.role:
            self.set_ready(member.slot, is_ready=False)
            self._roles[member.slot] = instance.role
        self.pairs.put(member.slot, instance)
        self.prices.put(member.slot, instance, member.price_correction.factor, way)
        is_staying = member.listed and instance.state is InstanceState.READY
        noted = _Noted(instance.card, is_staying, instance.adapters)
        self._members[member] = noted
        self._ballot.count(noted, +1)
        self._add_adapters(member.slot, instance)
        member.matching = member.identity == identity(self.card)
        return self._choose_card() or (member,)

    def remove(self, member: Member) -> Sequence[Member]:
        """Let a worker go.

        Returns:
            Those of the others whose `matching` may have changed.
        """
        noted = self._members.pop(member)
        self._ballot.count(noted, -1)
        self._drop_adapters(member.slot)
        self.set_ready(member.slot, is_ready=False)
        del self._roles[member.slot]
        self.pairs.remove(member.slot)
        self.prices.remove(member.slot)
        return self._choose_card()

    def elect(self) -> Sequence[Member]:
        """Have the card rule that most of those have who answer and stay, of equals the first; for a first look at all of them.

        Returns:
            Those whose `matching` may have changed.
        """
        staying = [member for member, noted in self._members.items() if noted.is_staying] or [*self._members]
        answering = [member for member in staying if member.instance.role is not Role.PREFILL] or staying
        ((most, _),) = Counter(member.identity for member in answering).most_common(1)
        if most == identity(self.card):
            return ()
        return self._rule(next(member for member in answering if member.identity == most))

    def elect_if_unanswered(self, now_s: float, patience_s: float) -> Sequence[Member]:
        """Elect where nobody has been ready to answer for so long, as when only prefill workers are left of a version; asked now and then.

        Returns:
            Those whose `matching` may have changed.
        """
        if self.num_ready:
            self._unanswered_since_s = None
        elif self._unanswered_since_s is None:
            self._unanswered_since_s = now_s
        elif now_s - self._unanswered_since_s >= patience_s:
            return self.elect()
        return ()

    @property
    def ready(self) -> NDArray[np.bool_]:
        return self._whole.view

    @property
    def num_ready(self) -> int:
        return self._whole.count

    @property
    def ready_prefill(self) -> NDArray[np.bool_]:
        return self._prefill.view

    @property
    def num_ready_prefill(self) -> int:
        return self._prefill.count

    def with_adapter(self, ready: NDArray[np.bool_], adapter: str) -> NDArray[np.bool_]:
        """Say which of `ready` have an adapter: (num_slots,), an array of its own."""
        holders = self._holders.get(adapter)
        return np.zeros_like(ready) if holders is None else ready & holders

    def has_adapter(self, adapter: str) -> bool:
        """Say whether a worker has an adapter, be it one that may get no requests now."""
        return adapter in self._holders

    def adapter_cards(self) -> Mapping[str, ModelCard]:
        """Give the card of each adapter, by name, which some worker may get requests for: the same object until that changes."""
        if self._adapter_cards is None or self._adapted is not self.card:
            self._adapter_cards = {adapter: self.card.adapted(adapter) for adapter in self._ready_holders}
            self._adapted = self.card
        return self._adapter_cards

    def mismatch(self, member: Member) -> str | None:
        """Say why a worker's blocks are none of the others'; None where they are."""
        if member.matching:
            return None
        card, ours = member.instance.card, self.card
        if card.block_size != ours.block_size:
            what = f"blocks of {card.block_size} tokens, the model's other workers have {ours.block_size}"
        else:
            files = sorted({file.name for file in {*card.files} ^ {*ours.files}})
            other = f"other {', '.join(files)}" if files else "other weights, number formats or engine"
            what = f"{_named(card)}, the model's other workers have {_named(ours)}: {other}"
        return f"{what}; it is used once these are gone"

    def set_ready(self, slot: int, *, is_ready: bool) -> None:
        """Say whether a worker may get what is for its role."""
        of_role = self._prefill if self._roles.get(slot) is Role.PREFILL else self._whole
        if of_role.set(slot, is_ready=is_ready) and of_role is self._whole:
            for adapter in self._adapters.get(slot, ()):
                self._count_ready_holder(adapter, +1 if is_ready else -1)

    def grow(self, num_slots: int) -> None:
        """Have this many slots."""
        more = (0, num_slots - len(self.ready))
        self._whole.grow(num_slots)
        self._prefill.grow(num_slots)
        self._holders = {adapter: np.pad(holders, more) for adapter, holders in self._holders.items()}
        self.prices.grow(num_slots)

    def check(self) -> None:
        """Raise AssertionError where counts and members disagree."""
        self.pairs.check()
        self.prices.check()
        self.traffic.check()
        for of_role in (self._whole, self._prefill):
            of_role.check()
        for slot in np.flatnonzero(self.ready | self.ready_prefill).tolist():
            is_prefill = self._roles[slot] is Role.PREFILL
            assert is_prefill == bool(self.ready_prefill[slot]) != bool(self.ready[slot]), (
                f"slot {slot}: its role"
            )
        ready = {adapter: int((holders & self.ready).sum()) for adapter, holders in self._holders.items()}
        assert {adapter: count for adapter, count in ready.items() if count} == self._ready_holders, (
            "adapters: those who have them and are ready are counted"
        )
        assert set(self.adapter_cards()) == set(self._ready_holders), "adapters: a card for each"
        assert len(self._holders) <= self._adapters_max, f"{len(self._holders)} adapters: past the bound"
        for adapter, holders in self._holders.items():
            expected = {member.slot for member, noted in self._members.items() if adapter in noted.adapters}
            slots = set(np.flatnonzero(holders).tolist())
            assert slots, f"adapter {adapter}: nobody has it"
            # one that came when there were too many is known with those that came since
            assert slots <= expected, f"adapter {adapter}: {slots} are said to have it, {expected} have"
        for of, counted in (
            (list(self._members.values()), self._ballot.of_all),
            ([noted for noted in self._members.values() if noted.is_staying], self._ballot.of_staying),
        ):
            assert Counter(noted.card for noted in of) == counted, f"cards: {counted} for {of}"
        assert not self._members or self._ballot.has(self.card), "a card that somebody has rules"
        for member in self._members:
            assert member.matching == (member.identity == identity(self.card)), (
                f"{member.instance.name}: matches"
            )

    def _add_adapters(self, slot: int, instance: Instance) -> None:
        known: list[str] = []
        for adapter in instance.adapters:
            holders = self._holders.get(adapter)
            if holders is None:
                if len(self._holders) >= self._adapters_max:
                    _log.warning(
                        "adapter_left_out",
                        adapter=adapter,
                        worker=instance.name,
                        adapters_max=self._adapters_max,
                    )
                    continue
                holders = self._holders[adapter] = np.zeros_like(self.ready)
            holders[slot] = True
            known.append(adapter)
            if self.ready[slot]:
                self._count_ready_holder(adapter, +1)
        self._adapters[slot] = tuple(known)

    def _drop_adapters(self, slot: int) -> None:
        for adapter in self._adapters.pop(slot, ()):
            holders = self._holders[adapter]
            holders[slot] = False
            if not holders.any():
                del self._holders[adapter]
            if self.ready[slot]:
                self._count_ready_holder(adapter, -1)

    def _count_ready_holder(self, adapter: str, change: int) -> None:
        before = self._ready_holders[adapter]
        _count(self._ready_holders, adapter, change)
        if not before or before + change == 0:
            self._adapter_cards = None

    def _choose_card(self) -> Sequence[Member]:
        """Have another card rule where nobody who counts has the present one; prefer one that names blocks alike."""
        if self._ballot.has(self.card) or not self._members:
            return ()
        everybody = tuple(self._members)
        voters = [m for m in everybody if self._members[m].is_staying] or everybody
        names = identity(self.card)
        alike = [member for member in voters if member.identity == names]
        if not alike:
            return self._rule(voters[0])
        self.card = alike[0].instance.card
        return ()

    def _rule(self, ruler: Member) -> Sequence[Member]:
        """Have a member's card rule, that names blocks otherwise than the present one."""
        self.card = ruler.instance.card
        for member in self._members:
            member.matching = member.identity == identity(self.card)
        return tuple(self._members)


class _Ready:
    """Which slots may get something now. `view` (num_slots,) cannot be written to."""

    def __init__(self, num_slots: int) -> None:
        self.count = 0
        self._show(np.zeros(num_slots, dtype=np.bool_))

    def set(self, slot: int, *, is_ready: bool) -> bool:
        """Note it; gives whether it was otherwise."""
        if bool(self._slots[slot]) is is_ready:
            return False
        self._slots[slot] = is_ready
        self.count += 1 if is_ready else -1
        return True

    def grow(self, num_slots: int) -> None:
        self._show(np.pad(self._slots, (0, num_slots - len(self._slots))))

    def check(self) -> None:
        assert self.count == np.count_nonzero(self._slots), f"{self.count} of {self._slots} are ready"

    def _show(self, slots: NDArray[np.bool_]) -> None:
        self._slots = slots
        self.view = slots.view()
        self.view.flags.writeable = False


def _named(card: ModelCard) -> str:
    return f"salt {card.salt.hex()[:16]}"


def _count(counts: "Counter[T]", card: T, change: int) -> None:
    """Add, and keep no zeros: cards come and go as long as the process lives."""
    counts[card] += change
    if not counts[card]:
        del counts[card]
