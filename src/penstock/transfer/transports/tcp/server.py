"""The owner's side of transport `tcp`: checks requests and moves its own bytes."""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.core.descriptors import OffsetArray, Region, TransferOp
from penstock.core.errors import (
    ChecksumMismatch,
    PenstockError,
    ProtocolError,
    TransferError,
    TransferRefused,
    from_info,
)
from penstock.core.framing import UnknownFrame
from penstock.core.log import get_logger
from penstock.seams import Link, TransportHost
from penstock.transfer.config import TcpConfig
from penstock.transfer.link.frames import receive_exactly
from penstock.transfer.regions.regions import addresses_of, distinct
from penstock.transfer.transports.tcp.stream import DataStream, StreamRoom, StreamStalled
from penstock.transfer.transports.tcp_frames import (
    INLINE_BYTES_MAX,
    Batch,
    Done,
    Ended,
    Get,
    Go,
    PackedRanges,
    Push,
    Put,
    Stop,
    StreamReady,
    TcpFrame,
    check_sums,
    checksums_of,
    encode_frame,
    gather,
    places_in,
    scatter,
)

STREAM_NUMBER_BYTES = 4

_log = get_logger()


@dataclass(frozen=True, slots=True)
class TcpServer:
    """State that all TCP sessions of one agent share.

    Attributes:
        host: the agent.
        regions: its regions that `tcp` can move, by id.
        config: the bounds.
        room: for streams.
    """

    host: TransportHost
    regions: Mapping[int, Region]
    config: TcpConfig
    room: StreamRoom


@dataclass(slots=True, eq=False)
class _Push:
    """A large transfer of one peer. `end_reason`: the error that ended it. `gone`: done when it uses no memory any more."""

    batch: Batch
    op: TransferOp
    stream: DataStream
    regions: Mapping[int, Region]  # which keeps the memory alive
    gone: "asyncio.Future[None]"
    end_reason: PenstockError | None = None

    def end(self, error: PenstockError) -> None:
        self.end_reason = self.end_reason or error
        self.stream.abort()


@dataclass(slots=True, eq=False)
class TcpSession:
    """The session of one peer, over the link that the peer opened. The event loop owns it."""

    server: TcpServer
    link: Link
    _streams: dict[int, DataStream] = field(default_factory=dict)
    _pushes: dict[int, _Push] = field(default_factory=dict)
    _unauthenticated: int = 0  # streams that have not said their number yet
    _unstarted: set[socket.socket] = field(default_factory=set)  # those of them that nobody listens to yet

    def received(self, frame: TcpFrame | UnknownFrame) -> None:
        """Handle a message of the peer.

        Raises:
            ProtocolError: the message is not allowed here; the link ends.
        """
        match frame:
            case Put() | Get():
                self._answer(frame)
            case Push():
                self._begin(frame)
            case Stop(exchange=exchange, error=info):
                error = from_info(info) if info is not None else None
                if error is not None:
                    self.server.host.refused(error, self.link.peer)
                if exchange in self._pushes:
                    self._pushes[exchange].end(error or TransferError("the peer ended the transfer"))
            case UnknownFrame():
                pass
            case _:
                raise ProtocolError(f"agent {self.link.peer}: a {type(frame).__name__} from who asks")

    def accept(self, connection: socket.socket) -> None:
        """Take ownership of a stream.

        Raises:
            TransferRefused: there are too many.
        """
        count = len(self._streams) + self._unauthenticated
        if count >= self.server.config.streams_per_peer_max:
            raise TransferRefused(
                f"agent {self.link.peer} has {count} streams, as many as may be (tcp.streams_per_peer_max)"
            )
        self.server.room.check_room()
        self._unauthenticated += 1
        self._unstarted.add(connection)
        self.server.host.spawn(self._admit_stream(connection))

    async def deregister(self, region_id: int) -> None:
        """End transfers that use a region and wait for their end."""
        gone = TransferRefused(f"region {region_id} of agent {self.server.host.name} was deregistered")
        await self._end([push for push in self._pushes.values() if region_id in push.regions], gone)

    async def close(self, error: PenstockError) -> None:
        """End everything and wait for its end."""
        self.lost(error)
        await self._end(list(self._pushes.values()), error)

    def lost(self, error: PenstockError) -> None:
        """The link has ended."""
        for push in self._pushes.values():
            push.end(error)
        for stream in list(self._streams.values()):
            stream.abort()
        self._streams.clear()
        for connection in self._unstarted:
            connection.close()
        self._unstarted.clear()

    async def _end(self, pushes: list[_Push], error: PenstockError) -> None:
        for push in pushes:
            push.end(error)
        if pushes:
            await asyncio.wait([push.gone for push in pushes])

    async def _admit_stream(self, connection: socket.socket) -> None:
        self._unstarted.discard(connection)
        try:
            async with asyncio.timeout(self.server.room.idle_s):
                number = int.from_bytes(await receive_exactly(connection, STREAM_NUMBER_BYTES), "little")
            self._check_number(number)
        except (OSError, EOFError, TimeoutError, TransferRefused) as error:
            _log.warning("transfer_stream_refused", peer=self.link.peer, error=str(error) or "no number came")
            connection.close()
            return
        except BaseException:
            connection.close()
            raise
        finally:
            self._unauthenticated -= 1
        self._streams[number] = DataStream(self.server.room, connection, number, self._forget)
        self._say(StreamReady(stream=number))

    def _say(self, frame: TcpFrame) -> None:
        self.link.send("tcp", encode_frame(frame))

    def _check_number(self, number: int) -> None:
        self.server.room.check_room()
        if self.link.error is not None or number in self._streams:
            raise TransferRefused(f"stream {number}: the link has ended, or has one of this number")

    def _forget(self, stream: DataStream) -> None:
        if self._streams.get(stream.number) is stream:
            del self._streams[stream.number]

    # -- what it asks for ---------------------------------------------------------------------------------------------

    def _answer(self, ask: Put | Get) -> None:
        """Answer a small transfer at once."""
        try:
            if isinstance(ask, Put):
                self._put(ask)
                answer: TcpFrame = Done(exchange=ask.exchange)
            else:
                answer = self._got(ask)
        except (TransferRefused, ChecksumMismatch) as error:
            answer = Ended(exchange=ask.exchange, error=error.to_info())
        self._say(answer)

    def _put(self, put: Put) -> None:
        _, addresses, lengths, num_bytes = self._checked(put.ranges, TransferOp.WRITE, INLINE_BYTES_MAX)
        if len(put.payload) != num_bytes:
            raise ProtocolError(f"agent {self.link.peer}: {len(put.payload)} bytes for ranges of {num_bytes}")
        if put.checksums:
            try:
                check_sums(places_in(put.payload, lengths), lengths, put.checksums)
            except ChecksumMismatch as error:
                self.server.host.refused(error, self.link.peer)
                raise
        scatter(put.payload, addresses, lengths)

    def _got(self, get: Get) -> Done:
        _, addresses, lengths, num_bytes = self._checked(get.ranges, TransferOp.READ, INLINE_BYTES_MAX)
        payload = gather(addresses, lengths, num_bytes)
        checksums = checksums_of(places_in(payload, lengths), lengths) if get.checksum else b""
        return Done(exchange=get.exchange, payload=payload, checksums=checksums)

    def _begin(self, ask: Push) -> None:
        stream = self._streams.get(ask.stream)
        if ask.exchange in self._pushes or (stream is not None and stream.is_held):
            raise ProtocolError(
                f"agent {self.link.peer}: exchange {ask.exchange} over stream {ask.stream}, one of which is in use"
            )
        try:
            regions, addresses, lengths, num_bytes = self._checked(
                ask.ranges, ask.op, self.server.config.piece_bytes_max
            )
        except TransferRefused as error:
            self._say(Ended(exchange=ask.exchange, error=error.to_info()))
            return
        if stream is None:
            ended = TransferError(f"stream {ask.stream} has ended")
            self._say(Ended(exchange=ask.exchange, error=ended.to_info()))
            return
        stream.hold()
        batch = Batch(ask.exchange, addresses, lengths, num_bytes, ask.checksum)
        push = _Push(batch, ask.op, stream, regions, asyncio.get_running_loop().create_future())
        self._pushes[ask.exchange] = push
        self.server.host.spawn(self._run_push(push))
        if ask.op is TransferOp.WRITE:
            self._say(Go(exchange=ask.exchange))

    def _checked(
        self, packed: PackedRanges, op: TransferOp, bytes_max: int
    ) -> tuple[dict[int, Region], OffsetArray, OffsetArray, int]:
        """Authorise a peer's ranges and give (regions, addresses, lengths, total bytes).

        Raises:
            TransferRefused: the peer may not do this.
            ProtocolError: the ranges are invalid, or exceed `bytes_max`.
        """
        ranges, keys = packed.unpack()
        self.server.host.authorize(self.link.peer, keys, ranges, op)
        regions = {region_id: self._reachable(region_id) for region_id in distinct(ranges.region_ids)}
        # no range is longer than its region: 64 bits are enough
        num_bytes = int(ranges.lengths[0]) if len(ranges) == 1 else ranges.total_bytes
        if num_bytes > bytes_max:
            raise ProtocolError(
                f"agent {self.link.peer}: {num_bytes} bytes at once, at most {bytes_max} may be"
            )
        addresses = addresses_of(ranges, {region_id: region.address for region_id, region in regions.items()})
        return regions, addresses, ranges.lengths, num_bytes

    def _reachable(self, region_id: int) -> Region:
        region = self.server.regions.get(region_id)
        if region is None:
            error = TransferRefused(f"region {region_id} cannot be reached by tcp")
            self.server.host.refused(error, self.link.peer)
            raise error
        return region

    async def _run_push(self, push: _Push) -> None:
        error: PenstockError | None = None
        try:
            if push.op is TransferOp.WRITE:
                await push.stream.receive(push.batch)
            else:
                await push.stream.send(push.batch)
        except (ProtocolError, ChecksumMismatch, StreamStalled) as failure:
            error = push.end_reason or failure
            if push.end_reason is None:
                self.server.host.refused(failure, self.link.peer)
        except PenstockError as failure:
            error = push.end_reason or failure
        except Exception as failure:  # noqa: BLE001 - the peer waits for an answer
            _log.exception("transfer_failed", peer=self.link.peer)
            error = TransferError(f"an internal error of agent {self.server.host.name}: {failure!r}")
        finally:
            del self._pushes[push.batch.exchange]
            if push.stream.is_broken:
                self._forget(push.stream)
            push.stream.release()
            push.gone.set_result(None)
        exchange = push.batch.exchange
        answer = Done(exchange=exchange) if error is None else Ended(exchange=exchange, error=error.to_info())
        self._say(answer)
