"""A model's workers, and which of them may get a request now.

Discovery may list workers of one model whose cards differ, as while a new version rolls out. Those whose blocks
are named otherwise must not share requests: one card rules, and whoever differs waits until the others are gone.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.core.types import InstanceState, ModelCard
from penstock.router.member import Member, identity
from penstock.router.price_table import PriceTable
from penstock.router.traffic import Traffic


@dataclass(frozen=True, slots=True)
class _Noted:
    """How a member is counted. Who leaves soon has no say in the card while others stay."""

    card: ModelCard
    is_staying: bool


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

    One event loop owns it. `ready` (num_slots,) is True for those that may get requests: a view that cannot be
    written to.
    """

    def __init__(self, first: Member, num_slots: int) -> None:
        """Make a pool under the card of its first worker, which has yet to be `put`."""
        self.card = first.instance.card
        self._show(np.zeros(num_slots, dtype=np.bool_))
        self.num_ready = 0
        self.prices = PriceTable(num_slots)
        self.traffic = Traffic()
        self._members: dict[Member, _Noted] = {}
        self._ballot = _Ballot()

    def __len__(self) -> int:
        return len(self._members)

    def put(self, member: Member) -> Sequence[Member]:
        """Take in a worker, or what discovery says anew about one.

        Returns:
            Those whose `matching` may have changed.
        """
        old = self._members.get(member)
        if old is not None:
            self._ballot.count(old, -1)
        instance = member.instance
        self.prices.put(member.slot, instance, member.drift.factor)
        noted = _Noted(instance.card, member.listed and instance.state is InstanceState.READY)
        self._members[member] = noted
        self._ballot.count(noted, +1)
        member.matching = member.identity == identity(self.card)
        return self._choose_card() or (member,)

    def remove(self, member: Member) -> Sequence[Member]:
        """Let a worker go.

        Returns:
            Those of the others whose `matching` may have changed.
        """
        self._ballot.count(self._members.pop(member), -1)
        self.set_ready(member.slot, is_ready=False)
        self.prices.remove(member.slot)
        return self._choose_card()

    def set_ready(self, slot: int, *, is_ready: bool) -> None:
        if bool(self.ready[slot]) is not is_ready:
            self._ready[slot] = is_ready
            self.num_ready += 1 if is_ready else -1

    def grow(self, num_slots: int) -> None:
        """Have this many slots."""
        self._show(np.pad(self._ready, (0, num_slots - len(self._ready))))
        self.prices.grow(num_slots)

    def check(self) -> None:
        """Raise AssertionError where counts and members disagree."""
        self.prices.check()
        self.traffic.check()
        assert self.num_ready == np.count_nonzero(self.ready), f"{self.num_ready} of {self.ready} are ready"
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

    def _show(self, ready: NDArray[np.bool_]) -> None:
        self._ready = ready
        self.ready = ready.view()
        self.ready.flags.writeable = False

    def _choose_card(self) -> Sequence[Member]:
        """Have another card rule where nobody who counts has the present one; prefer one that names blocks alike."""
        if self._ballot.has(self.card) or not self._members:
            return ()
        everybody = tuple(self._members)
        voters = [m for m in everybody if self._members[m].is_staying] or everybody
        names = identity(self.card)
        alike = [member for member in voters if member.identity == names]
        self.card = (alike or voters)[0].instance.card
        if alike:
            return ()
        for member in everybody:
            member.matching = member.identity == identity(self.card)
        return everybody


def _count(counts: Counter[ModelCard], card: ModelCard, change: int) -> None:
    """Add, and keep no zeros: cards come and go as long as the process lives."""
    counts[card] += change
    if not counts[card]:
        del counts[card]
