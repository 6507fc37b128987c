"""The load of each worker: its last report, plus what was sent to it since.

A report says how many of this frontend's requests it includes (`WorkerLoad.accepted_requests`). Requests go to a worker in
order, so a report covers exactly the first reservations. A reservation counts from the decision until the first report that
covers it, and never twice.

The `own` columns ignore reports: unfinished requests of this router. The `peer` columns are the same of all other routers, as
of the worker's last report.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.load import WorkerLoad

Column = NDArray[np.int64]
# Rows of the table of columns; rows from _OWN on ignore reports.
(
    _RUNNING,
    _WAITING,
    _ACTIVE,
    _CACHED,
    _CONTEXT,
    _TOTAL,
    _QUEUED,
    _UNREPORTED,
    _PEER,
    _PEER_PREFILL,
    _PEER_PAIRS,
    _PEERS,
    _OWN,
    _OWN_PREFILL,
    _OWN_PAIRS,
    _OWN_BLOCKS,
    _OWN_PROMPTS,
) = range(17)


@dataclass(slots=True, eq=False)
class Reservation:
    """What one request adds to a worker's load until a report covers it, and to the `own` columns until it ends.

    `number` counts the requests sent on the present connection, from 1. `is_expected`: a prefetch; the request follows.
    `prefill_tokens` are 0 once its first token has come.
    """

    slot: int
    number: int
    prefill_tokens: int
    blocks: int
    prefill_pairs: int = 0
    is_expected: bool = False
    tenant: str = ""
    open: bool = True
    covered: bool = False


@dataclass(slots=True)
class Reserved:
    """Sums of one worker's reservations that no report covers yet."""

    requests: int = 0
    prefill_tokens: int = 0
    blocks: int = 0
    expected: int = 0


@dataclass(slots=True, eq=False)
class _Account:
    """One worker's account; `sent` counts the requests on the present connection."""

    load: WorkerLoad | None = None
    sent: int = 0
    reserved: Reserved = field(default_factory=Reserved)
    uncovered: deque[Reservation] = field(default_factory=deque)
    peer_arrivals: int | None = None  # as of the last report


class LoadTracker:
    """Load columns by worker slot, each (num_slots,) int64: reported plus reserved. Not thread-safe; one task owns it.

    Columns change with every call, so reading them costs nothing. They are read-only views; take them anew after `grow`.
    """

    def __init__(self, num_slots: int = 1) -> None:
        self._show(np.zeros((_OWN_PROMPTS + 1, num_slots), dtype=np.int64))
        self._accounts = [_Account() for _ in range(num_slots)]
        self._prompts: dict[str, Counter[int]] = {}  # of each tenant without a first token, by slot
        self._prompt_tokens: dict[str, Counter[int]] = {}  # of these, to compute
        self.listener: Callable[[], None] | None = None
        """Called when a worker may have less to do."""

    def _show(self, table: Column) -> None:
        self._table = table
        self._rows = [memoryview(row) for row in table]
        """Of the table: a memoryview reads or writes one number in a third of the time."""
        columns = table.view()
        columns.flags.writeable = False
        self.running_requests: Column = columns[_RUNNING]
        """Reserved requests included."""
        self.waiting_requests: Column = columns[_WAITING]
        """Expected requests included."""
        self.active_blocks: Column = columns[_ACTIVE]
        self.cached_blocks: Column = columns[_CACHED]
        """Blocks in the prefix cache, in use or not."""
        self.context_tokens: Column = columns[_CONTEXT]
        """Tokens of context of decoding requests, as of the last report."""
        self.total_blocks: Column = columns[_TOTAL]
        """0 where unknown."""
        self.queued_prefill_tokens: Column = columns[_QUEUED]
        self.unreported_requests: Column = columns[_UNREPORTED]
        """Reserved requests, also counted as running."""
        self.peer_requests: Column = columns[_PEER]
        self.peer_prefill_tokens: Column = columns[_PEER_PREFILL]
        self.peer_prefill_pairs: Column = columns[_PEER_PAIRS]
        self.peers: Column = columns[_PEERS]
        """Other routers that are connected to it."""
        self.own_requests: Column = columns[_OWN]
        """Requests of this router that have not ended."""
        self.own_prefill_tokens: Column = columns[_OWN_PREFILL]
        """Prompt tokens to compute of requests without a first token."""
        self.own_prefill_pairs: Column = columns[_OWN_PAIRS]
        """Pairs of such a token and a token that it attends to."""
        self.own_blocks: Column = columns[_OWN_BLOCKS]
        """Blocks of their prompts, shared ones counted for each."""
        self.own_prompts: Column = columns[_OWN_PROMPTS]
        """Requests of this router with prompt tokens to compute and without a first token."""

    @property
    def num_slots(self) -> int:
        return len(self._accounts)

    def reset(self, slot: int, total_blocks: int = 0) -> None:
        """Start a slot anew: a new connection counts requests from 1, and nothing is reserved."""
        for reservation in self._accounts[slot].uncovered:
            reservation.covered = True
        self._accounts[slot] = _Account()
        self._table[:_OWN, slot] = 0
        self._set_total(slot, total_blocks)

    def resize(self, slot: int, total_blocks: int) -> None:
        """Take a worker's number of blocks from discovery; a load report overrides it."""
        if self._accounts[slot].load is None:
            self._set_total(slot, total_blocks)

    def reserve(
        self,
        slot: int,
        prefill_tokens: int,
        blocks: int,
        cached_tokens: int = 0,
        *,
        is_expected: bool = False,
        tenant: str = "",
    ) -> Reservation:
        """Reserve for a request that is sent now; call in the order of sending.

        Args:
            slot: the worker.
            prefill_tokens: prompt tokens to compute there.
            blocks: of its prompt.
            cached_tokens: prompt tokens before these.
            is_expected: only a prefetch is sent now; the request follows after its prefill elsewhere.
            tenant: whose request it is.
        """
        account = self._accounts[slot]
        account.sent += 1
        pairs = prefill_tokens * cached_tokens + prefill_tokens * (prefill_tokens + 1) // 2
        reservation = Reservation(slot, account.sent, prefill_tokens, blocks, pairs, is_expected, tenant)
        account.uncovered.append(reservation)
        self._add_reserved(reservation, +1)
        rows = self._rows
        rows[_OWN][slot] += 1
        rows[_OWN_PREFILL][slot] += prefill_tokens
        rows[_OWN_PAIRS][slot] += pairs
        rows[_OWN_BLOCKS][slot] += blocks
        if prefill_tokens:
            rows[_OWN_PROMPTS][slot] += 1
            self._prompts.setdefault(tenant, Counter())[slot] += 1
            self._prompt_tokens.setdefault(tenant, Counter())[slot] += prefill_tokens
        return reservation

    def report(self, slot: int, load: WorkerLoad) -> int:
        """Take a worker's newest report, which replaces the reservations that it covers.

        Returns:
            Requests that other routers have sent there since its last report.
        """
        account = self._accounts[slot]
        account.load = load
        arrivals = 0 if account.peer_arrivals is None else load.peer_arrivals - account.peer_arrivals
        account.peer_arrivals = load.peer_arrivals
        reserved, uncovered = account.reserved, account.uncovered
        while uncovered and uncovered[0].number <= load.accepted_requests:
            reservation = uncovered.popleft()
            reservation.covered = True
            reserved.requests -= not reservation.is_expected
            reserved.expected -= reservation.is_expected
            reserved.prefill_tokens -= reservation.prefill_tokens
            reserved.blocks -= reservation.blocks
        rows = self._rows
        rows[_RUNNING][slot] = load.running_requests + reserved.requests
        rows[_WAITING][slot] = load.waiting_requests + reserved.expected
        rows[_ACTIVE][slot] = load.active_blocks + reserved.blocks
        rows[_CACHED][slot] = load.cached_blocks
        rows[_CONTEXT][slot] = load.context_tokens
        rows[_TOTAL][slot] = load.total_blocks
        rows[_QUEUED][slot] = load.queued_prefill_tokens + reserved.prefill_tokens
        rows[_UNREPORTED][slot] = reserved.requests
        rows[_PEER][slot] = load.peer_requests
        rows[_PEER_PREFILL][slot] = load.peer_prefill_tokens
        rows[_PEER_PAIRS][slot] = load.peer_prefill_pairs
        rows[_PEERS][slot] = load.peers
        if self.listener is not None:
            self.listener()
        return max(arrivals, 0)

    def prefill_done(self, reservation: Reservation) -> None:
        """Note the first token: the request's prompt is computed."""
        slot, tokens = reservation.slot, reservation.prefill_tokens
        if not tokens:
            return
        self._rows[_OWN_PREFILL][slot] -= tokens
        self._rows[_OWN_PAIRS][slot] -= reservation.prefill_pairs
        if not reservation.covered:
            self._accounts[slot].reserved.prefill_tokens -= tokens
            self._rows[_QUEUED][slot] -= tokens
        self._end_prompt(reservation)
        if self.listener is not None:
            self.listener()

    def release(self, reservation: Reservation) -> None:
        """Release a reservation. Safe twice."""
        if not reservation.open:
            return
        reservation.open = False
        slot = reservation.slot
        if not reservation.covered:
            reservation.covered = True
            self._accounts[slot].uncovered.remove(reservation)
            self._add_reserved(reservation, -1)
        rows = self._rows
        rows[_OWN][slot] -= 1
        rows[_OWN_PREFILL][slot] -= reservation.prefill_tokens
        rows[_OWN_PAIRS][slot] -= reservation.prefill_pairs
        rows[_OWN_BLOCKS][slot] -= reservation.blocks
        self._end_prompt(reservation)
        if self.listener is not None:
            self.listener()

    def has_room_beside_others(self, tenant: str, at_once: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Mask (num_slots,) the workers with up to `at_once` prompts of other tenants from this router, and fewer of this tenant's."""
        mask: NDArray[np.bool_] = self.own_prompts <= at_once
        for slot, count in self._prompts.get(tenant, {}).items():
            mask[slot] = self.own_prompts[slot] - count <= at_once[slot] and count < at_once[slot]
        return mask

    def tokens_by_tenant(self, mask: NDArray[np.bool_]) -> Mapping[str, int]:
        """Sum each tenant's prompt tokens to compute on some workers, (num_slots,), of requests of this router without a first token."""
        sums = {
            tenant: sum(tokens for slot, tokens in by_slot.items() if mask[slot])
            for tenant, by_slot in self._prompt_tokens.items()
        }
        return {tenant: tokens for tenant, tokens in sums.items() if tokens}

    def open_requests(self, slot: int) -> int:
        """Count the requests sent to a worker that have not ended."""
        return int(self.own_requests[slot])

    def requests(self, slot: int) -> int:
        """Count all requests on a worker, other frontends' included, as of its last report."""
        return int(self.running_requests[slot] + self.waiting_requests[slot])

    def load(self, slot: int) -> WorkerLoad | None:
        """Give a worker's last report on this connection."""
        return self._accounts[slot].load

    def peer_arrivals(self, slot: int) -> int | None:
        """Count the requests that a worker has taken from other routers; None before its first report."""
        return self._accounts[slot].peer_arrivals

    def reserved(self, slot: int) -> Reserved:
        """Sum a worker's reservations that no report covers yet."""
        return replace(self._accounts[slot].reserved)

    def grow(self, num_slots: int) -> None:
        """Have at least this many slots."""
        more = num_slots - self.num_slots
        if more > 0:
            self._show(np.pad(self._table, ((0, 0), (0, more))))
            self._accounts.extend(_Account() for _ in range(more))

    def check(self) -> None:
        """Raise AssertionError where columns, sums and reservations disagree."""
        for slot, account in enumerate(self._accounts):
            uncovered, load = account.uncovered, account.load or WorkerLoad()
            expected = sum(r.is_expected for r in uncovered)
            sums = (
                len(uncovered) - expected,
                sum(r.prefill_tokens for r in uncovered),
                sum(r.blocks for r in uncovered),
                expected,
            )
            assert account.reserved == Reserved(*sums), f"slot {slot}: reserved is the sum, {sums}"
            assert all(r.open and not r.covered and r.slot == slot for r in uncovered), (
                f"slot {slot}: only open reservations without a report count"
            )
            numbers = [r.number for r in uncovered]
            assert numbers == sorted(set(numbers)), f"slot {slot}: in the order sent, got {numbers}"
            requests, prefill_tokens, blocks, _ = sums
            *columns, _, queued, unreported = self._table[:_PEER, slot].tolist()
            peers = self._table[_PEER:_OWN, slot].tolist()
            assert unreported == requests, f"slot {slot}: {unreported} are unreported, of {requests}"
            assert [*columns, queued, *peers] == [
                load.running_requests + requests,
                load.waiting_requests + expected,
                load.active_blocks + blocks,
                load.cached_blocks,
                load.context_tokens,
                load.queued_prefill_tokens + prefill_tokens,
                load.peer_requests,
                load.peer_prefill_tokens,
                load.peer_prefill_pairs,
                load.peers,
            ], f"slot {slot}: {columns}, {queued} and {peers} are not what was reported plus {sums}"
            *own, pairs, blocks_of_prompts, prompts = self._table[_OWN:, slot].tolist()
            assert prompts == sum(by_slot[slot] for by_slot in self._prompts.values()), (
                f"slot {slot}: {prompts} prompts are those of all tenants"
            )
            assert (prompts > 0) == (own[1] > 0), f"slot {slot}: {prompts} prompts of {own[1]} tokens"
            assert own[1] == sum(by_slot[slot] for by_slot in self._prompt_tokens.values()), (
                f"slot {slot}: {own[1]} prompt tokens are those of all tenants"
            )
            assert (pairs > 0) == (own[1] > 0), f"slot {slot}: {pairs} pairs of {own[1]} tokens to compute"
            own.append(blocks_of_prompts)
            assert all(part <= whole for part, whole in zip(sums[:3], own, strict=True)), (
                f"slot {slot}: what is reserved, {sums}, is part of what is open, {own}"
            )

    def _end_prompt(self, reservation: Reservation) -> None:
        """Forget the prompt of a request that has its first token, or is over."""
        if not reservation.prefill_tokens:
            return
        slot, tenant = reservation.slot, reservation.tenant
        by_slot, tokens_by_slot = self._prompts[tenant], self._prompt_tokens[tenant]
        self._rows[_OWN_PROMPTS][slot] -= 1
        by_slot[slot] -= 1
        tokens_by_slot[slot] -= reservation.prefill_tokens
        reservation.prefill_tokens = reservation.prefill_pairs = 0
        if not by_slot[slot]:
            del by_slot[slot], tokens_by_slot[slot]
        if not by_slot:
            del self._prompts[tenant], self._prompt_tokens[tenant]

    def _set_total(self, slot: int, total_blocks: int) -> None:
        """Write a number of blocks; it is clipped, as it comes from another process."""
        self._table[_TOTAL, slot] = min(max(total_blocks, 0), np.iinfo(np.int64).max)

    def _add_reserved(self, reservation: Reservation, sign: int) -> None:
        slot, prefill_tokens, blocks = (
            reservation.slot,
            sign * reservation.prefill_tokens,
            sign * reservation.blocks,
        )
        reserved = self._accounts[slot].reserved
        rows = self._rows
        if reservation.is_expected:
            reserved.expected += sign
            rows[_WAITING][slot] += sign
        else:
            reserved.requests += sign
            rows[_RUNNING][slot] += sign
            rows[_UNREPORTED][slot] += sign
        reserved.prefill_tokens += prefill_tokens
        reserved.blocks += blocks
        rows[_ACTIVE][slot] += blocks
        rows[_QUEUED][slot] += prefill_tokens
