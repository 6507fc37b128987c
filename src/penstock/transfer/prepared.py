"""A list of ranges made ready once and posted again and again."""

from dataclasses import dataclass
from typing import Protocol

from penstock.core.descriptors import RangePairs, Region, TransferOp
from penstock.core.errors import TransferRefused
from penstock.seams import Move
from penstock.transfer.handle import Telemetry, TransferHandle
from penstock.transfer.peer import Peer, Way
from penstock.transfer.regions import distinct


@dataclass(frozen=True, slots=True, eq=False)
class Posting:
    """A transfer as it was posted: what moves, which way, by what, and whom to tell."""

    prepared: "PreparedTransfer"
    op: TransferOp
    way: Way
    notify: bytes
    handle: TransferHandle


class Carrier(Protocol):
    """Runs what was posted."""

    def carry(self, posting: Posting, move: Move, timeout_s: float | None) -> None:
        """Run a move, at once if it is small.

        Raises:
            Overloaded: too many are under way.
        """
        ...


class Poster(Protocol):
    """The agent, as far as a prepared transfer needs it."""

    @property
    def running(self) -> Carrier: ...

    def check_prepared(self, prepared: "PreparedTransfer", op: TransferOp) -> None:
        """Refuse what has changed since.

        Raises:
            TransferRefused: a region is gone, or may not be written.
            PeerLost: the peer is gone.
        """
        ...


class PreparedTransfer:
    """Local and remote ranges, checked and merged; `post` moves them, in either direction, as often as it is called."""

    __slots__ = (
        "_agent",
        "_moves",
        "_ways",
        "local_ids",
        "num_ranges",
        "pairs",
        "peer",
        "regions",
        "remote_ids",
    )

    def __init__(
        self, agent: Poster, peer: Peer, pairs: RangePairs, regions: list[Region], num_ranges: int
    ) -> None:
        """Take what `TransferAgent.prepare` has checked."""
        self.peer = peer
        self.pairs = pairs
        self.regions = regions
        self.num_ranges = num_ranges
        self.local_ids = frozenset(distinct(pairs.local.region_ids))
        self.remote_ids = frozenset(distinct(pairs.remote.region_ids))
        self._agent = agent
        self._ways: dict[TransferOp, tuple[list[Way], dict[str, str]]] = {}
        self._moves: dict[tuple[TransferOp, str, bool], Move] = {}

    def post(
        self,
        op: TransferOp,
        *,
        notify: bytes = b"",
        timeout_s: float | None = None,
        checksum: bool | None = None,
    ) -> TransferHandle:
        """Begin to move the bytes. See `TransferAgent.post`."""
        if not isinstance(op, TransferOp):
            raise TypeError(f"op: {op!r}; expected TransferOp.READ or TransferOp.WRITE")
        self._agent.check_prepared(self, op)
        ways, refusals = self._found(op)
        pairs = self.pairs
        num_bytes, num_ranges = pairs.total_bytes, len(pairs.lengths)
        expected: dict[str, float] = {}
        way, least_s, cold = ways[0], float("inf"), None
        for able in ways:
            seconds = able.speeds.seconds(op, able.channel.cost(op), num_bytes, num_ranges)
            if not able.is_set_up:
                cold = able
                seconds += able.setup_left_s(op)
            expected[able.name] = seconds
            if seconds < least_s:
                way, least_s = able, seconds
        if cold is not None and cold is not way:
            cold.forgo(op, least_s, num_bytes, num_ranges)
        telemetry = Telemetry(num_bytes, self.num_ranges, way.name, expected, refusals)
        move = self._move(op, way, way.checksums if checksum is None else checksum)
        handle = TransferHandle(telemetry)
        self._agent.running.carry(Posting(self, op, way, notify, handle), move, timeout_s)
        return handle

    def _found(self, op: TransferOp) -> tuple[list[Way], dict[str, str]]:
        found = self._ways.get(op)
        if found is None:
            found = self.peer.ways_for(op, self.regions, self.peer.infos_of(self.pairs.remote))
            if not found[0]:
                why = "; ".join(f"{name}: {reason}" for name, reason in found[1].items()) or "there is none"
                raise TransferRefused(
                    f"no transport moves these bytes to or from agent {self.peer.name}: {why}"
                )
            self._ways[op] = found
        return found

    def _move(self, op: TransferOp, way: Way, checksum: bool) -> Move:  # noqa: FBT001 - part of a key
        key = op, way.name, checksum
        move = self._moves.get(key)
        if move is None:
            move = self._moves[key] = way.channel.prepare(op, self.pairs, checksum=checksum)
        return move
