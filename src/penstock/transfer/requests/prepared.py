"""Prepared lists of ranges, and the requests that post them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.core.descriptors import RangePairs, Region, TransferOp
from penstock.core.errors import (
    ChecksumMismatch,
    PenstockError,
    TransferCancelled,
    TransferError,
    TransferRefused,
)
from penstock.seams import Move
from penstock.transfer.regions.regions import distinct
from penstock.transfer.requests.handle import Telemetry, TransferHandle
from penstock.transfer.requests.peer import Peer
from penstock.transfer.requests.routes import Route, choose, next_of

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
