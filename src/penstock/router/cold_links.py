"""Links between workers over which no KV has moved yet, and what of their set-up a request is still charged.

The first read over a link takes longer: it sets the link up. Charged in full, that could keep a link from ever being
used, as each request alone is worth less; charged to nobody, it falls on the first short prompt. So it is as with skis,
rented until the rent has come to their price: what requests did without for the sake of a link is taken off what the
next ones are charged. Sending them elsewhere has never cost more than one set-up when the link is used.

Source: the ski rental problem; Karlin, Manasse, Rudolph and Sleator, "Competitive snoopy caching", 1988.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_NEVER, _EVER = np.inf, -np.inf


@dataclass(frozen=True, slots=True)
class Foregone:
    """What a request costs more, in seconds, as it does without the link from the worker in slot `source` to `reader`."""

    source: int
    reader: int
    seconds: float


class ColdLinks:
    """Workers by slot. One event loop owns it. Links are never closed while both workers live."""

    def __init__(self, num_slots: int) -> None:
        """Know of no link that was used."""
        self._num_slots = num_slots
        self._opened_s: dict[int, NDArray[np.float64]] = {}  # by source; `_EVER` where it has moved bytes
        self._foregone_s: dict[int, NDArray[np.float64]] = {}  # by source
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
        paid_s = np.where(opened_s < _NEVER, now_s - opened_s, self._foregone_s[source])
        charge_s: NDArray[np.float64] = np.maximum(setups_s - paid_s, 0.0)
        if not np.count_nonzero(charge_s):
            self._settled[source] = setups_s
            return None
        return charge_s

    def forgo(self, foregone: Foregone) -> None:
        """Take off its charge what a request costs more for not using a link."""
        self._know(foregone.source)
        self._foregone_s[foregone.source][foregone.reader] += foregone.seconds

    def open(self, source: int, reader: int, now_s: float) -> None:
        """Note that a link is used: if it never was, it is being set up from now on."""
        self._know(source)
        if self._opened_s[source][reader] == _NEVER:
            self._opened_s[source][reader] = now_s
            self._settled.pop(source, None)  # whatever was foregone, it takes its time now

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
            self._foregone_s[source] = np.pad(self._foregone_s[source], (0, more))

    def forget(self, slot: int) -> None:
        """Know nothing of the links of a worker: who comes after it has none."""
        self._opened_s.pop(slot, None)
        self._foregone_s.pop(slot, None)
        self._settled.clear()
        for source in self._opened_s:
            self._opened_s[source][slot] = _NEVER
            self._foregone_s[source][slot] = 0.0

    def check(self) -> None:
        """Raise AssertionError where arrays are not as they should be, or a link counts as paid for that is not."""
        assert self._opened_s.keys() == self._foregone_s.keys(), "cold links: known alike"
        for source, opened_s in self._opened_s.items():
            foregone_s = self._foregone_s[source]
            assert len(opened_s) == len(foregone_s) == self._num_slots, f"slot {source}: as long as the loads"
            assert (foregone_s >= 0).all(), f"slot {source}: foregone seconds below nothing"
            settled = self._settled.get(source)
            if settled is not None:
                assert ((opened_s < _NEVER) | (foregone_s >= settled)).all(), f"slot {source}: settled"
        assert self._settled.keys() <= self._opened_s.keys(), "cold links: settled that nobody knows"

    def _know(self, source: int) -> None:
        if source not in self._opened_s:
            self._opened_s[source] = np.full(self._num_slots, _NEVER)
            self._foregone_s[source] = np.zeros(self._num_slots)
