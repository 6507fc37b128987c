"""Running transfers. Small ones finish within `post`, each other one has a task."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

from penstock.core.descriptors import TransferOp
from penstock.core.errors import (
    DeadlineExceeded,
    Overloaded,
    PenstockError,
    TransferCancelled,
    TransferError,
)
from penstock.core.log import get_logger
from penstock.seams import Move
from penstock.transfer.config import TransferConfig
from penstock.transfer.counters import TransferCounters, add
from penstock.transfer.notification_queue import NotificationQueue
from penstock.transfer.requests.peer import Peer
from penstock.transfer.requests.prepared import TransferRequest

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
