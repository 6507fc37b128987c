"""Link set-up cost: what a request is charged for the first KV transfer between two workers.

The first read over a link takes longer because it sets the link up. Charged in full, the set-up could keep a link from ever
being used, as one request gains less than it. Charged to nobody, the set-up delays the first short prompt. So the ski
rental rule applies: a request that avoids a link credits the link with the seconds that avoiding it cost, and the credit
is taken off the next charge. Avoided links never cost more than one set-up altogether.

Source: the ski rental problem; Karlin, Manasse, Rudolph and Sleator, "Competitive snoopy caching", 1988.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_NEVER, _EVER = np.inf, -np.inf


@dataclass(frozen=True, slots=True)
class LinkCredit:
    """Seconds that a request loses by avoiding the link from the prefill worker in slot `source` to the decode worker in `reader`."""

    source: int
    reader: int
    seconds: float


class LinkSetupCost:
    """Workers by slot. One event loop owns it. Links are never closed while both workers live."""

    def __init__(self, num_slots: int) -> None:
        """Know of no link that was used."""
        self._num_slots = num_slots
        self._opened_s: dict[int, NDArray[np.float64]] = {}  # by source; `_EVER` where it has moved bytes
        self._credit_s: dict[int, NDArray[np.float64]] = {}  # by source
        self._settled: dict[int, NDArray[np.float64]] = {}  # by source, the set-ups of which nothing is left

    def charge_s(
        self, source: int, setups_s: NDArray[np.float64] | None, now_s: float
    ) -> NDArray[np.float64] | None:
        """Say what is charged for the first use of each link from a worker: what is left of its set-up.

        Args:
            source: the slot of who has the KV.
            setups_s: (num_slots,) seconds that set-ups take; None for none, and the same object as long as they are the same.
            now_s: the loop's time.

        Returns:
            (num_slots,) seconds, not to be written to; None where nothing is.
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

    def forgo(self, credit: LinkCredit) -> None:
        """Take off its charge what a request costs more for not using a link."""
        self._know(credit.source)
        self._credit_s[credit.source][credit.reader] += credit.seconds

    def open(self, source: int, reader: int, now_s: float) -> None:
        """Note that a link is used: if it never was, it is being set up from now on."""
        self._know(source)
        if self._opened_s[source][reader] == _NEVER:
            self._opened_s[source][reader] = now_s
            self._settled.pop(source, None)  # whatever credit there was, it takes its time now

    def moved(self, source: int, reader: int) -> None:
        """Note that KV has moved over a link."""
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
        """Know nothing of the links of a worker: who comes after it has none."""
        self._opened_s.pop(slot, None)
        self._credit_s.pop(slot, None)
        self._settled.clear()
        for source in self._opened_s:
            self._opened_s[source][slot] = _NEVER
            self._credit_s[source][slot] = 0.0

    def check(self) -> None:
        """Raise AssertionError where arrays are not as they should be, or a link counts as paid for that is not."""
        assert self._opened_s.keys() == self._credit_s.keys(), "link set-ups: opened and credited alike"
        for source, opened_s in self._opened_s.items():
            credit_s = self._credit_s[source]
            assert len(opened_s) == len(credit_s) == self._num_slots, f"slot {source}: as long as the loads"
            assert (credit_s >= 0).all(), f"slot {source}: negative credit"
            settled = self._settled.get(source)
            if settled is not None:
                assert ((opened_s < _NEVER) | (credit_s >= settled)).all(), f"slot {source}: settled"
        assert self._settled.keys() <= self._opened_s.keys(), "link set-ups: settled but unknown"

    def _know(self, source: int) -> None:
        if source not in self._opened_s:
            self._opened_s[source] = np.full(self._num_slots, _NEVER)
            self._credit_s[source] = np.zeros(self._num_slots)
