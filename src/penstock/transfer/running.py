"""Transfers under way: small ones are done at once, others run in a task of their own until they end, or are ended."""

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
from penstock.transfer.mailbox import Mailbox
from penstock.transfer.peer import Peer
from penstock.transfer.prepared import Posting

_log = get_logger()


class _Hung(TransferError):  # noqa: N818 - a state
    """It took longer than it may; whether that is the end depends on what is left of the deadline."""


@dataclass(slots=True, eq=False)
class _Running:
    posting: Posting
    task: "asyncio.Task[None] | None" = None
    doom: PenstockError | None = None  # why it was cancelled

    def end(self, error: PenstockError) -> None:
        if self.doom is None and self.task is not None:
            self.doom = error
            self.task.cancel()


class RunningTransfers:
    """Those of one agent. Its event loop owns them."""

    def __init__(self, config: TransferConfig, counters: TransferCounters, mailbox: Mailbox) -> None:
        """Run nothing.

        Args:
            config: how many, and how long.
            counters: what became of them.
            mailbox: tells the peer that a transfer is done.
        """
        self._config = config
        self._counters = counters
        self._mailbox = mailbox
        self._running: dict[_Running, None] = {}  # in order: a simulation ends them so, again and again
        self._tasks: asyncio.TaskGroup | None = None

    def __len__(self) -> int:
        return len(self._running)

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Run transfers in tasks of this group from now on."""
        self._tasks = tasks

    def carry(self, posting: Posting, timeout_s: float | None) -> None:
        """Run a transfer, at once if it is small.

        Raises:
            TransferError: the agent is not open.
            TransferRefused: the notification is too long.
            Overloaded: too many are under way, or nobody reads this agent's notifications to itself.
        """
        if self._tasks is None:
            raise TransferError("the agent is not open; use it within `async with`")
        if len(self._running) >= self._config.transfers_max:
            raise Overloaded(
                f"{len(self._running)} transfers are under way, as many as may be (transfers_max); wait for some"
            )
        self._mailbox.check(posting.prepared.peer.link, posting.notify)
        first: Move | None = posting.move()
        began_s = perf_counter()
        try:
            is_done = first is not None and first.run_now()
        except PenstockError as error:
            is_done, first = False, self._next(posting, error)
            if first is None:
                self._ended(posting, error)
                return
        if is_done:
            posting.handle.telemetry.wire_s = perf_counter() - began_s
            self._ended(posting, None)
            return
        running = _Running(posting)
        posting.handle.cancels_by(lambda: running.end(TransferCancelled("the transfer was cancelled")))
        self._running[running] = None
        deadline_s = self._config.timeout_s if timeout_s is None else timeout_s
        running.task = self._tasks.create_task(self._run(running, first, deadline_s, began_s))
        running.task.add_done_callback(lambda _: self._forget(running))

    async def _run(self, running: _Running, first: Move | None, timeout_s: float, posted_s: float) -> None:
        posting = running.posting
        telemetry = posting.handle.telemetry
        telemetry.queue_s = perf_counter() - posted_s
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        error: PenstockError | None = None
        move = first
        while move is not None:
            began_s = perf_counter()
            patience_s = posting.patience_s(until_s - loop.time())
            error = await self._attempt(running, move, patience_s)
            telemetry.wire_s = perf_counter() - began_s
            move = None if error is None or running.doom else self._next(posting, error)
        if isinstance(error, _Hung):
            way = posting.way
            pairs = posting.prepared.pairs
            cost = way.channel.cost(posting.op)
            if telemetry.wire_s > cost.seconds(pairs.total_bytes, len(pairs.lengths)):
                self._learn(posting)
            error = DeadlineExceeded(
                f"{telemetry.num_bytes} bytes by {telemetry.backend}, agent {posting.prepared.peer.name}: not done"
                f" within {timeout_s:g} s"
            )
        self._running.pop(running, None)
        self._ended(posting, running.doom or error)

    @staticmethod
    async def _attempt(running: _Running, move: Move, patience_s: float) -> PenstockError | None:
        """Run a move, and give what went wrong."""
        backend = running.posting.way.name
        try:
            async with asyncio.timeout(patience_s):
                await move.run()
        except TimeoutError:
            return _Hung(f"not done within {patience_s:g} s")
        except asyncio.CancelledError:
            return running.doom or TransferCancelled("the task of the transfer was cancelled")
        except PenstockError as failure:
            return failure
        except Exception as failure:  # noqa: BLE001 - whoever waits must hear of it
            _log.exception("transfer_failed", backend=backend)
            return TransferError(f"{backend}: {type(failure).__name__}: {failure}; see the log")
        return None

    def _next(self, posting: Posting, error: PenstockError) -> Move | None:
        """Turn to the next way after a failure; None where there is none, or it would do no better."""
        failed = posting.way.name
        if not posting.fail_over(error, asyncio.get_running_loop().time()):
            return None
        add(self._counters.failed_over_transfers, failed)
        _log.warning(
            "transfer_failed_over",
            peer=posting.prepared.peer.name,
            backend=failed,
            to=posting.way.name,
            error=error.message,
        )
        try:
            return posting.move()
        except PenstockError as refusal:
            return self._next(posting, TransferError(refusal.message))

    def _forget(self, running: _Running) -> None:
        self._running.pop(running, None)
        if running.posting.handle.is_pending:  # cancelled before its first turn
            self._ended(running.posting, running.doom or TransferCancelled("the transfer was cancelled"))

    def _ended(self, posting: Posting, error: PenstockError | None) -> None:
        telemetry, way, op = posting.handle.telemetry, posting.way, posting.op
        if error is None:
            add(self._counters.transfers, way.name)
            moved = self._counters.read_bytes if op is TransferOp.READ else self._counters.written_bytes
            add(moved, way.name, telemetry.num_bytes)
            way.worked()
            self._learn(posting)
            if posting.notify:
                self._mailbox.send(posting.prepared.peer.link, posting.notify)
        elif isinstance(error, TransferCancelled):
            self._counters.cancelled_transfers += 1
        else:
            add(self._counters.failed_transfers, way.name)
        posting.handle.finish(error)

    @staticmethod
    def _learn(posting: Posting) -> None:
        way, pairs, op = posting.way, posting.prepared.pairs, posting.op
        way.speeds.learn(
            op,
            way.channel.cost(op),
            pairs.total_bytes,
            len(pairs.lengths),
            took_s=posting.handle.telemetry.wire_s,
            now_s=posting.posted_s,
        )

    def using_local(self, region_id: int) -> list[_Running]:
        """List those that use a region of this agent, as local or as the remote side of a transfer with itself."""
        return [
            running
            for running in self._running
            if region_id in running.posting.prepared.local_ids
            or (
                running.posting.prepared.peer.link is None
                and region_id in running.posting.prepared.remote_ids
            )
        ]

    def using_remote(self, peer: Peer, region_id: int) -> list[_Running]:
        """List those that use a region of a peer."""
        return [running for running in self._of(peer) if region_id in running.posting.prepared.remote_ids]

    async def end_peer(self, peer: Peer, error: PenstockError) -> None:
        """End all transfers with a peer; they have ended when this returns."""
        await _end(self._of(peer), error)

    async def end_local(self, region_id: int, error: PenstockError) -> None:
        """End those that use a region of this agent."""
        await _end(self.using_local(region_id), error)

    async def end_remote(self, peer: Peer, region_id: int, error: PenstockError) -> None:
        """End those that use a region of a peer."""
        await _end(self.using_remote(peer, region_id), error)

    def tasks_of(self, peer: Peer) -> list["asyncio.Task[None]"]:
        """List the tasks of transfers with a peer that have not ended."""
        return [running.task for running in self._of(peer) if running.task is not None]

    async def close(self, error: PenstockError) -> None:
        """End every transfer, and take no more."""
        self._tasks = None
        await _end(list(self._running), error)

    def _of(self, peer: Peer) -> list[_Running]:
        return [running for running in self._running if running.posting.prepared.peer is peer]


async def _end(users: Iterable[_Running], error: PenstockError) -> None:
    ending = []
    for running in users:
        running.end(error)
        if running.task is not None:
            ending.append(running.task)
    if ending:
        await asyncio.wait(ending)
