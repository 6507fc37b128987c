"""Link set-up cost: what a request is charged for the first KV transfer between two workers.

The first read over a link takes longer because it sets the link up. Charged in full, the set-up could keep a link from ever
being used, as one request gains less than it. Charged to no request, the set-up delays the first short prompt. So the ski
rental rule applies: a request that avoids a link credits the link with the seconds that avoiding it cost, and the credit
is taken off the next charge. Avoided links never cost more than one set-up altogether.

Source: the ski rental problem; Karlin, Manasse, Rudolph and Sleator, "Competitive snoopy caching", 1988.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.instances import Instance, Role
from penstock.router.disagg.disagg import DisaggDecision
from penstock.router.fleet.worker_pool import ModelPool
from penstock.router.links.kv_transfer_pairs import KvTransferPairs, common_transports
from penstock.router.policy.selector import WorkerSelector
from penstock.seams import RoutingContext

_NEVER, _EVER = np.inf, -np.inf
_WITHIN_A_PROCESS = ("memory",)


@dataclass(frozen=True, slots=True)
class LinkCredit:
    """Seconds that a request loses by avoiding the link from the prefill worker in slot `source` to the decode worker in `reader`."""

    source: int
    reader: int
    seconds: float


class LinkSetup:
    """The links between workers, by slot. A link is never closed while both workers live."""

    def __init__(self, num_slots: int, selector: WorkerSelector) -> None:
        """Know of no link that was used."""
        self._num_slots = num_slots
        self._selector = selector
        self._opened_s: dict[int, NDArray[np.float64]] = {}  # by source; `_EVER` where it has moved bytes
        self._credit_s: dict[int, NDArray[np.float64]] = {}  # by source
        self._settled: dict[int, NDArray[np.float64]] = {}  # by source, the set-ups of which nothing is left
        self._setups: dict[int, tuple[NDArray[np.intp], NDArray[np.float64] | None]] = {}  # by source

    def setup_s(self, pool: ModelPool, context: RoutingContext, source: int) -> NDArray[np.float64] | None:
        """Give what is charged for each link from a worker, in seconds; None where the policy predicts no seconds."""
        if not self._selector.term_names:
            return None
        return self.charge_s(source, self.setups_s(pool.pairs, source), context.now_s)

    def taken(self, decision: DisaggDecision, tie: int, *, again: bool) -> None:
        """Open the link that the request uses, and credit the link that the request avoids."""
        credit = None if again else self.credit(decision, tie)
        prefill, now_s = decision.slots[1], decision.whole_context.now_s
        if prefill is not None:
            self.open(prefill, decision.slots[0], now_s)
        if credit is not None:
            self.credit_link(credit)

    def moved(self, source: int, reader: int) -> None:
        """Note that the worker in slot `reader` has read KV of the worker in slot `source`."""
        self._know(source)
        self._opened_s[source][reader] = _EVER

    def grow(self, num_slots: int) -> None:
        """Have this many slots."""
        more = num_slots - self._num_slots
        self._num_slots = num_slots
        self._settled.clear()
        for source in self._opened_s:
            self._opened_s[source] = np.pad(self._opened_s[source], (0, more), constant_values=_NEVER)
            self._credit_s[source] = np.pad(self._credit_s[source], (0, more))

    def forget(self, slot: int) -> None:
        """Forget the worker in a slot."""
        for by_source in (self._opened_s, self._credit_s, self._setups):
            by_source.pop(slot, None)
        self._settled.clear()
        for source in self._opened_s:
            self._opened_s[source][slot] = _NEVER
            self._credit_s[source][slot] = 0.0

    def check(self, num_slots: int) -> None:
        """Raise AssertionError where slots, credits and set-ups disagree."""
        assert self._num_slots == num_slots, "link set-ups: as many slots as loads"
        assert self._opened_s.keys() == self._credit_s.keys(), "link set-ups: opened and credited alike"
        for source, opened_s in self._opened_s.items():
            credit_s = self._credit_s[source]
            assert len(opened_s) == len(credit_s) == self._num_slots, f"slot {source}: as long as the loads"
            assert (credit_s >= 0).all(), f"slot {source}: negative credit"
            settled = self._settled.get(source)
            if settled is not None:
                assert ((opened_s < _NEVER) | (credit_s >= settled)).all(), f"slot {source}: settled"
        assert self._settled.keys() <= self._opened_s.keys(), "link set-ups: settled but unknown"

    def setups_s(self, pairs: KvTransferPairs, source: int) -> NDArray[np.float64] | None:
        """Give the seconds from the first read of the KV of the worker in slot `source` until bytes move, by reader.

        Returns:
            (num_slots,), the same object until a worker comes, changes or goes, not to be written to; None for no seconds.
        """
        numbers = pairs.kinds(self._num_slots).numbers
        known = self._setups.get(source)
        if known is None or known[0] is not numbers:
            setups_s = np.zeros(self._num_slots)
            for slot, prefill, reader in pairs.readers(source, self._num_slots):
                if reader.role is not Role.PREFILL:
                    setups_s[slot] = _setup_s(prefill, reader)
            known = self._setups[source] = numbers, setups_s if setups_s.any() else None
        return known[1]

    def charge_s(
        self, source: int, setups_s: NDArray[np.float64] | None, now_s: float
    ) -> NDArray[np.float64] | None:
        """Give what is left to charge for each link from a worker: the set-up less credit, or less the time since it began.

        Args:
            source: the prefill worker's slot.
            setups_s: (num_slots,) seconds that set-ups take; None for none, and the same object as long as they are the same.
            now_s: the loop's time.

        Returns:
            (num_slots,) seconds, not to be written to; None where nothing is charged.
        """
        if setups_s is None or self._settled.get(source) is setups_s:
            return None
        opened_s = self._opened_s.get(source)
        if opened_s is None:
            return setups_s
        paid_s = np.where(opened_s < _NEVER, now_s - opened_s, self._credit_s[source])
        charge_s: NDArray[np.float64] = np.maximum(setups_s - paid_s, 0.0)
        if not np.count_nonzero(charge_s):
            self._settled[source] = setups_s
            return None
        return charge_s

    def credit(self, decision: DisaggDecision, tie: int) -> LinkCredit | None:
        """Compare a decision by cost with the one that a free link would have made; None where they are the same."""
        compared, rest, context = decision.comparison, decision.rest, decision.rest_context
        if decision.inputs.setup_s is None or compared.remote is None:
            return None
        if compared.setting is not None and not compared.is_remote:
            return None  # a setting kept the prompt from the link, not the link's charge
        assert rest is not None, "compared by cost"
        assert context is not None, "compared by cost"
        prices, round_trip_s = context.prices, decision.whole_context.prices.round_trip_s
        prices = prices.with_move(prices.onboard_token_s, round_trip_s)
        free = self._selector.choose(context.changed(prices=prices), tie)
        if compared.is_remote:
            if free.slot == rest.slot:
                return None
            costs = free.prices()
            seconds = float(costs[rest.slot] - costs[free.slot])
        else:
            assert compared.local is not None, "compared by cost"
            assert compared.prefill is not None, "compared by cost"
            seconds = compared.local - (compared.prefill + free.cost + compared.kv_transfer)
        return None if seconds <= 0 else LinkCredit(decision.prompt.slot, free.slot, seconds)

    def credit_link(self, credit: LinkCredit) -> None:
        """Take what a request lost by avoiding a link off the link's charge."""
        self._know(credit.source)
        self._credit_s[credit.source][credit.reader] += credit.seconds

    def open(self, source: int, reader: int, now_s: float) -> None:
        """Note that a request uses a link: an unused link is being set up from now on."""
        self._know(source)
        if self._opened_s[source][reader] == _NEVER:
            self._opened_s[source][reader] = now_s
            self._settled.pop(source, None)  # whatever credit there was, it takes its time now

    def _know(self, source: int) -> None:
        if source not in self._opened_s:
            self._opened_s[source] = np.full(self._num_slots, _NEVER)
            self._credit_s[source] = np.zeros(self._num_slots)


def _setup_s(source: Instance, reader: Instance) -> float:
    """Give the seconds until KV first moves between two workers that fit; 0 where neither keeps memory for KV.

    Between hosts an agent prepares every transport when it connects. Within a host the slow transports wait until no other works.
    """
    here, there = reader.exchange, source.exchange
    if here is None or there is None or source.engine.kv_layout is None:
        return 0.0
    same_host = here.host == there.host
    common = common_transports(here, there, same_host=same_host)
    if there.listens != _WITHIN_A_PROCESS:
        common = common.difference(_WITHIN_A_PROCESS)
    said = zip(here.transports, here.setups_s, strict=False)
    taken_s = [seconds for name, seconds in said if name in common and 0 <= seconds < math.inf]
    which = min if same_host else max
    return which(taken_s, default=0.0)
