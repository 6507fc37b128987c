"""Transfers: a prepared list of ranges, the handle of a posted one, and those that run."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter
from typing import Protocol

from penstock.core.descriptors import RangePairs, Region, TransferOp
from penstock.core.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    Overloaded,
    PenstockError,
    TransferCancelled,
    TransferError,
    TransferRefused,
)
from penstock.core.log import get_logger
from penstock.seams import Move
from penstock.transfer.config import TransferConfig
from penstock.transfer.counters import TransferCounters, add
from penstock.transfer.notification_queue import NotificationQueue
from penstock.transfer.regions.regions import distinct
from penstock.transfer.requests.peer import Peer
from penstock.transfer.requests.routes import Route, choose, next_of


class TransferState(Enum):
    """The state of a transfer."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Telemetry:
    """Measurements of a transfer.

    Attributes:
        num_bytes: bytes to move.
        ranges: number of ranges posted, before neighbours are merged.
        backend: the transport that was chosen.
        expected_s: expected seconds by transport, of those that can do it; the lowest was chosen.
        refusals: by transport, why it cannot do it.
        failures: by transport, the error of each that was tried before `backend`.
        queue_s: seconds from `post` until bytes began to move.
        wire_s: seconds that bytes moved.
    """

    num_bytes: int
    ranges: int
    backend: str
    expected_s: Mapping[str, float] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    queue_s: float = 0.0
    wire_s: float = 0.0

    @property
    def reason(self) -> str:
        """Say why this backend was chosen."""
        seconds = ", ".join(f"{name} {1e6 * value:,.0f} us" for name, value in self.expected_s.items())
        text = (
            f"lowest expected time: {seconds}"
            if len(self.expected_s) > 1
            else f"the only one that can: {seconds}"
        )
        failed = (f"{name} failed: {why}" for name, why in self.failures.items())
        return "; ".join([text, *failed, *(f"not {name}: {why}" for name, why in self.refusals.items())])


class TransferHandle:
    """The handle of a transfer, made by `TransferAgent.post`. The agent's event loop owns it."""

    __slots__ = ("_cancel", "_done", "_error", "state", "telemetry")

    def __init__(self, telemetry: Telemetry) -> None:
        """Begin as pending."""
        self.state = TransferState.PENDING
        self.telemetry = telemetry
        self._error: PenstockError | None = None
        self._done: asyncio.Future[None] | None = None  # made when somebody waits
        self._cancel: Callable[[], object] | None = None

    async def wait(self) -> None:
        """Return when every byte is at its target.

        Cancelling the wait does not cancel the transfer.

        Raises:
            PeerLost: the other agent is gone; its memory may hold a part of a write.
            TransferRefused: the peer does not let this happen.
            TransferCancelled: `cancel` was called.
            DeadlineExceeded: it took longer than its deadline.
            TransferError: anything else that went wrong.
        """
        if self.is_pending:
            if self._done is None:
                self._done = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._done)
        if self._error is not None:
            raise self._error

    async def complete(self) -> None:
        """Wait as `wait` does. Cancelling this cancels the transfer too, and returns when both sides' memory is free."""
        try:
            await self.wait()
        except asyncio.CancelledError:
            self.cancel()
            while self.is_pending:
                assert self._done is not None, "waited"
                with suppress(
                    asyncio.CancelledError
                ):  # once more: it is on its way out, and memory comes first
                    await asyncio.wait([self._done])
            raise

    def cancel(self) -> None:
        """Cancel the transfer; both sides' memory is free once `wait` has raised. No error if it has ended."""
        if self.is_pending and self._cancel is not None:
            self._cancel()

    @property
    def is_pending(self) -> bool:
        """Whether it has not ended yet."""
        return self.state is TransferState.PENDING

    @property
    def error(self) -> PenstockError | None:
        """The error that `wait` raises, once it has failed."""
        return self._error

    def cancels_by(self, cancel: Callable[[], object]) -> None:
        """Set the function that cancels it; for the agent."""
        self._cancel = cancel

    def finish(self, error: PenstockError | None = None) -> None:
        """Mark it as ended; for the agent."""
        self._error = error
        if error is None:
            self.state = TransferState.DONE
        elif isinstance(error, TransferCancelled):
            self.state = TransferState.CANCELLED
        else:
            self.state = TransferState.FAILED
        self._cancel = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


_FINAL = (TransferRefused, TransferCancelled, ChecksumMismatch)
"""Errors after which no other transport is tried."""
_TIMES_EXPECTED = 4
"""A transport is given up for another one after this many times its expected seconds and half of the deadline."""


@dataclass(slots=True, eq=False)
class TransferRequest:
    """A posted transfer. `routes` are all possible routes, `route` is the one in use."""

    prepared: "PreparedTransfer"
    op: TransferOp
    routes: Sequence[Route]
    route: Route
    notify: bytes
    handle: TransferHandle
    checksum: bool | None
    posted_s: float

    def move(self) -> Move:
        """Prepare the move by `route`."""
        checksum = self.route.checksums if self.checksum is None else self.checksum
        return self.prepared.move(self.op, self.route, checksum=checksum)

    def patience_s(self, left_s: float) -> float:
        """Give the seconds that the current route may take: all of `left_s` on the last route, else a part of it."""
        telemetry = self.handle.telemetry
        if len(telemetry.failures) + 1 == len(self.routes):
            return left_s
        return max(left_s / 2, min(left_s, _TIMES_EXPECTED * telemetry.expected_s[self.route.name]))

    def fail_over(self, error: PenstockError, now_s: float) -> bool:
        """Switch to the next route after a failure.

        Returns:
            whether there is a next route, and it is safe to move the bytes again.
        """
        route, peer = self.route, self.prepared.peer
        if not isinstance(error, TransferError) or isinstance(error, _FINAL) or peer.is_lost:
            return False
        route.failed(now_s)
        if any(route.transport.lingering(region_id) for region_id in self.prepared.local_ids):
            return False  # it may still write what another one has written
        telemetry = self.handle.telemetry
        tried = {*telemetry.failures, route.name}
        following = next_of(self.routes, tried, dict(telemetry.expected_s), now_s)
        if following is None:
            return False
        telemetry.failures[route.name] = error.message
        telemetry.backend = following.name
        self.route = following
        return True


class TransferStarter(Protocol):
    """Runs transfers."""

    def start(self, request: TransferRequest, timeout_s: float | None) -> None:
        """Run a transfer; a small one finishes at once.

        Raises:
            TransferError: the agent is not open.
            TransferRefused: the notification is too long.
            Overloaded: too many transfers are running, or this agent's own notification queue is full.
        """
        ...


class TransferOwner(Protocol):
    """The part of the agent that prepared transfers use."""

    @property
    def running(self) -> TransferStarter: ...

    def check_prepared(self, prepared: "PreparedTransfer", op: TransferOp) -> None:
        """Check that peer and regions are still there, and permit `op`.

        Raises:
            TransferRefused: a region is gone, or may not be written.
            PeerLost: the peer is gone.
        """
        ...


class PreparedTransfer:
    """Local and remote ranges, checked and merged; `post` moves them in either direction, any number of times."""

    __slots__ = (
        "_agent",
        "_moves",
        "_routes",
        "local_ids",
        "num_ranges",
        "pairs",
        "peer",
        "regions",
        "remote_ids",
    )

    def __init__(
        self, agent: TransferOwner, peer: Peer, pairs: RangePairs, regions: list[Region], num_ranges: int
    ) -> None:
        """Hold lists that `TransferAgent.prepare` has checked."""
        self.peer = peer
        self.pairs = pairs
        self.regions = regions
        self.num_ranges = num_ranges
        self.local_ids = frozenset(distinct(pairs.local.region_ids))
        self.remote_ids = frozenset(distinct(pairs.remote.region_ids))
        self._agent = agent
        self._routes: dict[TransferOp, tuple[list[Route], dict[str, str]]] = {}
        self._moves: dict[tuple[TransferOp, str, bool], Move] = {}

    def post(
        self,
        op: TransferOp,
        *,
        notify: bytes = b"",
        timeout_s: float | None = None,
        checksum: bool | None = None,
    ) -> TransferHandle:
        """Post a transfer of these ranges. See `TransferAgent.post`."""
        if not isinstance(op, TransferOp):
            raise TypeError(f"op: {op!r}; expected TransferOp.READ or TransferOp.WRITE")
        self._agent.check_prepared(self, op)
        routes, refusals = self._found(op)
        pairs = self.pairs
        num_bytes, num_ranges = pairs.total_bytes, len(pairs.lengths)
        now_s = asyncio.get_running_loop().time()
        route, expected = choose(routes, op, num_bytes, num_ranges, now_s)
        handle = TransferHandle(Telemetry(num_bytes, self.num_ranges, route.name, expected, refusals))
        self._agent.running.start(
            TransferRequest(self, op, routes, route, notify, handle, checksum, now_s), timeout_s
        )
        return handle

    def move(self, op: TransferOp, route: Route, *, checksum: bool) -> Move:
        """Give the move by a route; it is prepared at its first use."""
        key = op, route.name, checksum
        move = self._moves.get(key)
        if move is None:
            move = self._moves[key] = route.channel.prepare(op, self.pairs, checksum=checksum)
        return move

    def _found(self, op: TransferOp) -> tuple[list[Route], dict[str, str]]:
        found = self._routes.get(op)
        if found is None:
            found = self.peer.routes_for(op, self.regions, self.peer.infos_of(self.pairs.remote))
            if not found[0]:
                why = "; ".join(f"{name}: {reason}" for name, reason in found[1].items()) or "there is none"
                raise TransferRefused(
                    f"no transport moves these bytes to or from agent {self.peer.name}: {why}"
                )
            self._routes[op] = found
        return found


_log = get_logger()


class _Hung(TransferError):  # noqa: N818 - a state
    """A route took longer than its patience; the deadline may still allow another one."""


@dataclass(slots=True, eq=False)
class _Running:
    request: TransferRequest
    task: "asyncio.Task[None] | None" = None
    end_reason: PenstockError | None = None  # why it was cancelled

    def end(self, error: PenstockError) -> None:
        if self.end_reason is None and self.task is not None:
            self.end_reason = error
            self.task.cancel()


class RunningTransfers:
    """The running transfers of one agent. Its event loop owns them."""

    def __init__(
        self, config: TransferConfig, counters: TransferCounters, notification_queue: NotificationQueue
    ) -> None:
        """Run nothing.

        Args:
            config: bounds and deadlines.
            counters: count transfers by result.
            notification_queue: sends the notifications of transfers.
        """
        self._config = config
        self._counters = counters
        self._notification_queue = notification_queue
        self._running: dict[_Running, None] = {}  # in order: a simulation ends them so, again and again
        self._tasks: asyncio.TaskGroup | None = None

    def __len__(self) -> int:
        return len(self._running)

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Run transfers in tasks of this group from now on."""
        self._tasks = tasks

    def start(self, request: TransferRequest, timeout_s: float | None) -> None:
        """Run a transfer; a small one finishes at once.

        Raises:
            TransferError: the agent is not open.
            TransferRefused: the notification is too long.
            Overloaded: too many transfers are running, or this agent's own notification queue is full.
        """
        if self._tasks is None:
            raise TransferError("the agent is not open; use it within `async with`")
        if len(self._running) >= self._config.transfers_max:
            raise Overloaded(
                f"{len(self._running)} transfers are under way, as many as may be (transfers_max); wait for some"
            )
        self._notification_queue.check(request.prepared.peer.link, request.notify)
        first: Move | None = request.move()
        began_s = perf_counter()
        try:
            is_done = first is not None and first.run_now()
        except PenstockError as error:
            is_done, first = False, self._next(request, error)
            if first is None:
                self._ended(request, error)
                return
        if is_done:
            request.handle.telemetry.wire_s = perf_counter() - began_s
            self._ended(request, None)
            return
        running = _Running(request)
        request.handle.cancels_by(lambda: running.end(TransferCancelled("the transfer was cancelled")))
        self._running[running] = None
        deadline_s = self._config.timeout_s if timeout_s is None else timeout_s
        running.task = self._tasks.create_task(self._run(running, first, deadline_s, began_s))
        running.task.add_done_callback(lambda _: self._forget(running))

    async def _run(self, running: _Running, first: Move | None, timeout_s: float, posted_s: float) -> None:
        request = running.request
        telemetry = request.handle.telemetry
        telemetry.queue_s = perf_counter() - posted_s
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        error: PenstockError | None = None
        move = first
        while move is not None:
            began_s = perf_counter()
            patience_s = request.patience_s(until_s - loop.time())
            error = await self._attempt(running, move, patience_s)
            telemetry.wire_s = perf_counter() - began_s
            move = None if error is None or running.end_reason else self._next(request, error)
        if isinstance(error, _Hung):
            route = request.route
            pairs = request.prepared.pairs
            cost = route.channel.cost(request.op)
            if telemetry.wire_s > cost.seconds(pairs.total_bytes, len(pairs.lengths)):
                self._learn(request)
            error = DeadlineExceeded(
                f"{telemetry.num_bytes} bytes by {telemetry.backend}, agent {request.prepared.peer.name}: not done"
                f" within {timeout_s:g} s"
            )
        self._running.pop(running, None)
        self._ended(request, running.end_reason or error)

    @staticmethod
    async def _attempt(running: _Running, move: Move, patience_s: float) -> PenstockError | None:
        """Run a move and return its error, None for success."""
        backend = running.request.route.name
        try:
            async with asyncio.timeout(patience_s):
                await move.run()
        except TimeoutError:
            return _Hung(f"not done within {patience_s:g} s")
        except asyncio.CancelledError:
            return running.end_reason or TransferCancelled("the task of the transfer was cancelled")
        except PenstockError as failure:
            return failure
        except Exception as failure:  # noqa: BLE001 - whoever waits must hear of it
            _log.exception("transfer_failed", backend=backend)
            return TransferError(f"{backend}: {type(failure).__name__}: {failure}; see the log")
        return None

    def _next(self, request: TransferRequest, error: PenstockError) -> Move | None:
        """Prepare the move by the next route after a failure; None if no route is left, or none would do better."""
        failed = request.route.name
        if not request.fail_over(error, asyncio.get_running_loop().time()):
            return None
        add(self._counters.failed_over_transfers, failed)
        _log.warning(
            "transfer_failed_over",
            peer=request.prepared.peer.name,
            backend=failed,
            to=request.route.name,
            error=error.message,
        )
        try:
            return request.move()
        except PenstockError as refusal:
            return self._next(request, TransferError(refusal.message))

    def _forget(self, running: _Running) -> None:
        self._running.pop(running, None)
        if running.request.handle.is_pending:  # cancelled before its first turn
            self._ended(
                running.request, running.end_reason or TransferCancelled("the transfer was cancelled")
            )

    def _ended(self, request: TransferRequest, error: PenstockError | None) -> None:
        telemetry, route, op = request.handle.telemetry, request.route, request.op
        if error is None:
            add(self._counters.transfers, route.name)
            moved = self._counters.read_bytes if op is TransferOp.READ else self._counters.written_bytes
            add(moved, route.name, telemetry.num_bytes)
            route.worked()
            self._learn(request)
            if request.notify:
                self._notification_queue.send(request.prepared.peer.link, request.notify)
        elif isinstance(error, TransferCancelled):
            self._counters.cancelled_transfers += 1
        else:
            add(self._counters.failed_transfers, route.name)
        request.handle.finish(error)

    @staticmethod
    def _learn(request: TransferRequest) -> None:
        route, pairs, op = request.route, request.prepared.pairs, request.op
        route.speeds.learn(
            op,
            route.channel.cost(op),
            pairs.total_bytes,
            len(pairs.lengths),
            took_s=request.handle.telemetry.wire_s,
            now_s=request.posted_s,
        )

    def using_local(self, region_id: int) -> list[_Running]:
        """List transfers that use a region of this agent, on either side."""
        return [
            running
            for running in self._running
            if region_id in running.request.prepared.local_ids
            or (
                running.request.prepared.peer.link is None
                and region_id in running.request.prepared.remote_ids
            )
        ]

    def using_remote(self, peer: Peer, region_id: int) -> list[_Running]:
        """List transfers that use a region of a peer."""
        return [running for running in self._of(peer) if region_id in running.request.prepared.remote_ids]

    async def end_peer(self, peer: Peer, error: PenstockError) -> None:
        """End all transfers with a peer and wait for their end."""
        await _end(self._of(peer), error)

    async def end_local(self, region_id: int, error: PenstockError) -> None:
        """End the transfers that use a region of this agent."""
        await _end(self.using_local(region_id), error)

    async def end_remote(self, peer: Peer, region_id: int, error: PenstockError) -> None:
        """End the transfers that use a region of a peer."""
        await _end(self.using_remote(peer, region_id), error)

    def tasks_of(self, peer: Peer) -> list["asyncio.Task[None]"]:
        """List the tasks of running transfers with a peer."""
        return [running.task for running in self._of(peer) if running.task is not None]

    async def close(self, error: PenstockError) -> None:
        """End every transfer and accept no more."""
        self._tasks = None
        await _end(list(self._running), error)

    def _of(self, peer: Peer) -> list[_Running]:
        return [running for running in self._running if running.request.prepared.peer is peer]


async def _end(users: Iterable[_Running], error: PenstockError) -> None:
    ending = []
    for running in users:
        running.end(error)
        if running.task is not None:
            ending.append(running.task)
    if ending:
        await asyncio.wait(ending)
