"""How busy each worker is: its own report, plus what was sent to it since.

A report says how many of this frontend's requests it includes (`WorkerLoad.accepted_requests`); requests go
to a worker in order, so the reservations it covers are exactly the first that many. A reservation therefore
counts from the moment of the decision until the first report that knows of it, and never twice.

The `own` columns leave reports aside: what this router sent there and has not seen the end of.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.types import WorkerLoad

Column = NDArray[np.int64]
_COLUMNS = (
    "running_requests",
    "waiting_requests",
    "active_blocks",
    "total_blocks",
    "queued_prefill_tokens",
    "cached_blocks",
)


@dataclass(slots=True, eq=False)
class Reservation:
    """What one request adds to a worker until the worker's own report says so, and to `own` until it ends.

    `number` counts the requests sent on the present connection, from 1.
    """

    slot: int
    number: int
    prefill_tokens: int
    blocks: int
    open: bool = True
    covered: bool = False


@dataclass(slots=True)
class Reserved:
    """One worker's sum of what its report does not include yet."""

    requests: int
    prefill_tokens: int
    blocks: int


class LoadTracker:
    """Load columns by worker slot: reported + reserved. Not thread-safe; one task owns it."""

    def __init__(self, num_slots: int = 1) -> None:
        self.num_slots = num_slots
        self._reported: Column = np.zeros((len(_COLUMNS), num_slots), dtype=np.int64)
        self._reserved: Column = np.zeros((3, num_slots), dtype=np.int64)  # requests, prefill tokens, blocks
        self._uncovered: list[deque[Reservation]] = [deque() for _ in range(num_slots)]
        self._sent = [0] * num_slots
        self._own: Column = np.zeros((3, num_slots), dtype=np.int64)  # as `_reserved`
        self._loads: list[WorkerLoad | None] = [None] * num_slots

    @property
    def running_requests(self) -> Column:
        """(num_slots,), those reserved included: they run as soon as they arrive, or wait there."""
        column: Column = self._reported[0] + self._reserved[0]
        return column

    @property
    def waiting_requests(self) -> Column:
        column: Column = self._reported[1]
        return column

    @property
    def active_blocks(self) -> Column:
        column: Column = self._reported[2] + self._reserved[2]
        return column

    @property
    def total_blocks(self) -> Column:
        column: Column = self._reported[3]
        return column

    @property
    def queued_prefill_tokens(self) -> Column:
        column: Column = self._reported[4] + self._reserved[1]
        return column

    @property
    def cached_blocks(self) -> Column:
        """(num_slots,) blocks whose content can be found, in use or not."""
        column: Column = self._reported[5]
        return column

    @property
    def own_requests(self) -> Column:
        """(num_slots,) requests of this router that have not ended."""
        column: Column = self._own[0]
        return column

    @property
    def own_prefill_tokens(self) -> Column:
        """(num_slots,) what they had to compute when they were sent; nothing once their first token is here."""
        column: Column = self._own[1]
        return column

    @property
    def own_blocks(self) -> Column:
        """(num_slots,) blocks of their prompts, shared ones counted for each."""
        column: Column = self._own[2]
        return column

    def reset(self, slot: int, total_blocks: int = 0) -> None:
        """Begin anew with a worker's slot: a new connection counts requests from 1, and nothing is reserved."""
        self.grow(slot + 1)
        for reservation in self._uncovered[slot]:
            reservation.covered = True
        self._uncovered[slot].clear()
        self._reported[:, slot] = 0
        self._reported[3, slot] = total_blocks
        self._reserved[:, slot] = 0
        self._sent[slot] = 0
        self._loads[slot] = None

    def reserve(self, slot: int, prefill_tokens: int, blocks: int) -> Reservation:
        """Count a request that is being sent now, in the order in which requests are sent."""
        self._sent[slot] += 1
        reservation = Reservation(slot, self._sent[slot], prefill_tokens, blocks)
        self._uncovered[slot].append(reservation)
        self._reserved[:, slot] += (1, prefill_tokens, blocks)
        self._own[:, slot] += (1, prefill_tokens, blocks)
        return reservation

    def report(self, slot: int, load: WorkerLoad) -> None:
        """Take a worker's newest account; it replaces the reservations it includes."""
        self._reported[:, slot] = [getattr(load, column) for column in _COLUMNS]
        self._loads[slot] = load
        uncovered = self._uncovered[slot]
        while uncovered and uncovered[0].number <= load.accepted_requests:
            self._uncount(uncovered.popleft())

    def prefill_done(self, reservation: Reservation) -> None:
        """Note the first token: no prompt of this request is queued any more."""
        self._own[1, reservation.slot] -= reservation.prefill_tokens
        if not reservation.covered:
            self._reserved[1, reservation.slot] -= reservation.prefill_tokens
        reservation.prefill_tokens = 0

    def release(self, reservation: Reservation) -> None:
        """Note that the request has ended, in whatever way. Safe twice."""
        if not reservation.open:
            return
        reservation.open = False
        if not reservation.covered:
            self._uncovered[reservation.slot].remove(reservation)
            self._uncount(reservation)
        self._own[:, reservation.slot] -= (1, reservation.prefill_tokens, reservation.blocks)
        reservation.prefill_tokens = 0

    def open_requests(self, slot: int) -> int:
        """Count the requests sent to a worker that have not ended."""
        return int(self._own[0, slot])

    def requests(self, slot: int) -> int:
        """Count all requests on a worker, other frontends' included, as of its last report."""
        return int(self._reported[:2, slot].sum() + self._reserved[0, slot])

    def load(self, slot: int) -> WorkerLoad | None:
        """Give a worker's last report on this connection."""
        return self._loads[slot]

    def reserved(self, slot: int) -> Reserved:
        """Sum what a worker's report does not include yet."""
        requests, prefill_tokens, blocks = self._reserved[:, slot].tolist()
        return Reserved(requests, prefill_tokens, blocks)

    def grow(self, num_slots: int) -> None:
        """Have at least this many slots."""
        more = num_slots - self.num_slots
        if more <= 0:
            return
        self._reported = np.pad(self._reported, ((0, 0), (0, more)))
        self._reserved = np.pad(self._reserved, ((0, 0), (0, more)))
        self._own = np.pad(self._own, ((0, 0), (0, more)))
        self._uncovered.extend(deque() for _ in range(more))
        self._sent.extend([0] * more)
        self._loads.extend([None] * more)
        self.num_slots = num_slots

    def check(self) -> None:
        """Raise AssertionError where sums and reservations disagree."""
        for slot, uncovered in enumerate(self._uncovered):
            sums = [
                len(uncovered),
                sum(r.prefill_tokens for r in uncovered),
                sum(r.blocks for r in uncovered),
            ]
            assert self._reserved[:, slot].tolist() == sums, f"slot {slot}: reserved is the sum, {sums}"
            assert all(r.open and not r.covered and r.slot == slot for r in uncovered), (
                f"slot {slot}: only open reservations without a report count"
            )
            numbers = [r.number for r in uncovered]
            assert numbers == sorted(set(numbers)), f"slot {slot}: in the order sent, got {numbers}"
            own = self._own[:, slot].tolist()
            assert all(part <= whole for part, whole in zip(sums, own, strict=True)), (
                f"slot {slot}: what is reserved, {sums}, is part of what is open, {own}"
            )

    def _uncount(self, reservation: Reservation) -> None:
        reservation.covered = True
        self._reserved[:, reservation.slot] -= (1, reservation.prefill_tokens, reservation.blocks)
