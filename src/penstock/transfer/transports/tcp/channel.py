"""The initiator's side of transport `tcp`: asks the owner, and moves its own bytes over the link or over streams."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from penstock.core.descriptors import (
    MAIN_MEMORY,
    OffsetArray,
    RangePairs,
    Region,
    RegionInfo,
    TransferCost,
    TransferOp,
)
from penstock.core.errors import (
    ChecksumMismatch,
    ErrorInfo,
    PeerLost,
    PenstockError,
    ProtocolError,
    TransferError,
    from_info,
)
from penstock.core.framing import UnknownFrame
from penstock.seams import Link, Move
from penstock.transfer.regions.ranges import settled
from penstock.transfer.regions.regions import addresses_of, distinct, other_kind
from penstock.transfer.transports.tcp.server import STREAM_NUMBER_BYTES
from penstock.transfer.transports.tcp.stream import DataStream, StreamBroken, StreamRoom
from penstock.transfer.transports.tcp_frames import (
    RANGES_MAX,
    WINDOW_MAX,
    Batch,
    Contact,
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
    cut,
    encode_frame,
    gather,
    places_in,
    scatter,
)

_SPLIT_BYTES = 2 << 20
"""Shorter transfers use one stream, since each further stream costs a message."""
_SAME_HOST = TransferCost(start_s=150e-6, range_s=1e-7, bytes_per_s=3e9)
"""Between processes on two cores of an AMD EPYC, measured."""
_NETWORK = TransferCost(start_s=300e-6, range_s=1e-7, bytes_per_s=1.2e9)
"""A network of 10 Gbit/s; measurements correct it."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What one exchange moves."""

    packed: PackedRanges
    addresses: OffsetArray
    lengths: OffsetArray
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Exchange:
    """A request that waits for its answer."""

    number: int
    go: "asyncio.Future[None]"
    done: "asyncio.Future[Done]"
    stream: DataStream | None = None

    def end(self, error: PenstockError) -> None:
        """End it with an error, and the stream that moves bytes for it."""
        for future in (self.go, self.done):
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen, should nobody wait
        if self.stream is not None:
            self.stream.abort()


class TcpChannel:
    """The channel to one peer. The event loop owns it."""

    def __init__(
        self,
        link: Link,
        contact: Contact,
        room: StreamRoom,
        *,
        streams: int,
        inline_bytes_max: int,
        regions: Mapping[int, Region],
        remote: Mapping[int, RegionInfo],
    ) -> None:
        """Begin without streams.

        Args:
            link: to the peer.
            contact: its bounds.
            room: for streams.
            streams: streams that share one transfer, if the peer allows so many.
            inline_bytes_max: transfers up to this size go over the link.
            regions: this agent's, by id.
            remote: the peer's, by id.
        """
        self.link = link
        self.inline_bytes_max = inline_bytes_max
        self.streams = min(streams, contact.streams)
        self._contact = contact
        self._room = room
        self._regions = regions
        self._remote = remote
        self._numbers = count(1)
        self._stream_numbers = count(1)
        self._exchanges: dict[int, _Exchange] = {}
        self._idle: list[DataStream] = []
        self._opening: dict[int, asyncio.Future[None]] = {}
        self._turns = asyncio.Semaphore(self.streams)
        self._window = asyncio.Semaphore(min(contact.window, WINDOW_MAX))

    def refusal(self, op: TransferOp, local: Sequence[Region], remote: Sequence[RegionInfo]) -> str | None:
        del op
        kind = other_kind(MAIN_MEMORY, local, remote)
        if kind is not None:
            return f"{kind.value} cannot be sent from or received into"
        return None

    def cost(self, op: TransferOp) -> TransferCost:
        del op
        return _SAME_HOST if self.link.same_host else _NETWORK

    def prepare(self, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> Move:
        if not len(pairs):
            return Nothing()
        if pairs.total_bytes <= self.inline_bytes_max and len(pairs) <= RANGES_MAX:
            return SmallMove(self, op, self._piece(op, pairs), checksum=checksum)
        by_streams = min(self.streams, pairs.total_bytes // _SPLIT_BYTES)
        by_bounds = -(-pairs.total_bytes // self._contact.piece_bytes)
        parts = cut(pairs, max(by_streams, by_bounds, 1), RANGES_MAX - 1)
        return LargeMove(self, op, [self._piece(op, part) for part in parts], checksum=checksum)

    def forget(self, region_id: int) -> None: ...

    async def close(self) -> None:
        self.lost(PeerLost(f"agent {self.link.peer} was disconnected"))

    def lost(self, error: PenstockError) -> None:
        """The link has ended."""
        for exchange in list(self._exchanges.values()):
            exchange.end(error)
        for waiting in self._opening.values():
            if not waiting.done():
                waiting.set_exception(error)
        idle, self._idle = self._idle, []
        for stream in idle:
            stream.abort()

    def received(self, frame: TcpFrame | UnknownFrame) -> None:
        """Handle a message of the owner.

        Raises:
            ProtocolError: the message is not allowed here; the link ends.
        """
        match frame:
            case Done(exchange=number) | Ended(exchange=number) | Go(exchange=number):
                exchange = self._exchanges.get(number)
                if exchange is not None:  # else it was given up
                    self._answered(exchange, frame)
            case StreamReady(stream=number):
                waiting = self._opening.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(None)
            case UnknownFrame():
                pass
            case _:
                raise ProtocolError(f"agent {self.link.peer}: a {type(frame).__name__} from who is asked")

    def _answered(self, exchange: _Exchange, frame: TcpFrame | UnknownFrame) -> None:
        match frame:
            case Go() if not exchange.go.done():
                exchange.go.set_result(None)
            case Done() if not exchange.done.done():
                exchange.done.set_result(frame)
                if not exchange.go.done():
                    exchange.go.set_result(None)
            case Ended(error=info):
                exchange.end(_error_of(info))
            case _:
                raise ProtocolError(
                    f"agent {self.link.peer}: a second {type(frame).__name__} of one exchange"
                )

    # -- for moves ----------------------------------------------------------------------------------------------------

    async def put(self, piece: Piece, *, checksum: bool) -> None:
        async with self._window:
            exchange = self._asked()
            try:
                payload = gather(piece.addresses, piece.lengths, piece.num_bytes)
                sums = checksums_of(places_in(payload, piece.lengths), piece.lengths) if checksum else b""
                self._send(
                    Put(exchange=exchange.number, ranges=piece.packed, payload=payload, checksums=sums)
                )
                await self._done(exchange)
            finally:
                del self._exchanges[exchange.number]

    async def get(self, piece: Piece, *, checksum: bool) -> None:
        async with self._window:
            exchange = self._asked()
            try:
                self._send(Get(exchange=exchange.number, ranges=piece.packed, checksum=checksum))
                done = await exchange.done
            finally:
                del self._exchanges[exchange.number]
        if len(done.payload) != piece.num_bytes:
            raise ProtocolError(
                f"agent {self.link.peer} answers with {len(done.payload)} bytes for ranges of {piece.num_bytes}"
            )
        if checksum:
            try:
                check_sums(places_in(done.payload, piece.lengths), piece.lengths, done.checksums)
            except ChecksumMismatch as error:
                self._send(Stop(exchange=exchange.number, error=error.to_info()))
                raise
        scatter(done.payload, piece.addresses, piece.lengths)

    async def push(self, op: TransferOp, piece: Piece, *, checksum: bool) -> None:
        """Move a piece over a stream, once one is free."""
        async with self._turns:
            exchange = self._asked()
            try:
                stream = exchange.stream = await self._held_stream()
                try:
                    await self._push(op, piece, exchange, stream, checksum=checksum)
                finally:
                    exchange.stream = None
                    stream.release()
                    if not stream.is_broken:
                        self._idle.append(stream)
            finally:
                del self._exchanges[exchange.number]

    async def _push(
        self, op: TransferOp, piece: Piece, exchange: _Exchange, stream: DataStream, *, checksum: bool
    ) -> None:
        batch = Batch(exchange.number, piece.addresses, piece.lengths, piece.num_bytes, checksum)
        self._send(
            Push(
                exchange=exchange.number,
                stream=stream.number,
                op=op,
                ranges=piece.packed,
                checksum=checksum,
            )
        )
        try:
            if op is TransferOp.WRITE:
                await asyncio.shield(exchange.go)
                await stream.send(batch)
            else:
                await stream.receive(batch)
            await asyncio.shield(exchange.done)
        except StreamBroken as error:
            await self._last_word(exchange)
            if exchange.done.done():
                exchange.done.result()
            raise TransferError(f"agent {self.link.peer}: {error.message}") from error
        except BaseException as error:
            stream.abort()
            if not exchange.done.done():
                info = error.to_info() if isinstance(error, PenstockError) else None
                self._send(Stop(exchange=exchange.number, error=info))
                await self._last_word(exchange)
            raise

    async def _done(self, exchange: _Exchange) -> None:
        """Wait for the answer, even when cancelled, since the owner may still use memory."""
        try:
            await exchange.done
        except asyncio.CancelledError:
            if exchange.done.cancelled():
                exchange.done = asyncio.get_running_loop().create_future()
                await self._last_word(exchange)
            raise

    async def _last_word(self, exchange: _Exchange) -> None:
        """Wait for the owner's answer, for at most `idle_s`."""
        timer = asyncio.get_running_loop().call_later(
            self._room.idle_s, exchange.end, TransferError(f"agent {self.link.peer} does not answer")
        )
        try:
            await settled(exchange.done)
        finally:
            timer.cancel()

    def _asked(self) -> _Exchange:
        """Begin an exchange; the caller removes it."""
        if self.link.error is not None:
            raise PeerLost(self.link.error.message)
        loop = asyncio.get_running_loop()
        exchange = _Exchange(next(self._numbers), loop.create_future(), loop.create_future())
        self._exchanges[exchange.number] = exchange
        return exchange

    async def _held_stream(self) -> DataStream:
        stream = self._idle.pop() if self._idle else await self._open_stream()
        stream.hold()
        return stream

    async def _open_stream(self) -> DataStream:
        """Open a stream and wait until the owner knows its number."""
        self._room.check_room()
        number = next(self._stream_numbers)
        connection = await self.link.open_stream("tcp")
        stream = DataStream(self._room, connection, number, self._forget)
        ready = self._opening[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._room.idle_s):
                connection.send(
                    number.to_bytes(STREAM_NUMBER_BYTES, "little")
                )  # the first bytes: there is room
                await ready
        except BaseException as error:
            stream.abort()
            if isinstance(error, TimeoutError):
                raise TransferError(f"agent {self.link.peer}: stream {number} is not answered") from error
            if isinstance(error, OSError):
                raise self._no_stream() from error
            raise
        finally:
            del self._opening[number]
        return stream

    def _forget(self, stream: DataStream) -> None:
        """Remove an idle stream that has ended."""
        if stream in self._idle:
            self._idle.remove(stream)
        waiting = self._opening.get(stream.number)
        if waiting is not None and not waiting.done():
            waiting.set_exception(self._no_stream())

    def _no_stream(self) -> TransferError:
        return TransferError(
            f"agent {self.link.peer} takes no more streams; see its log and its tcp.streams_per_peer_max"
        )

    def _send(self, frame: TcpFrame) -> None:
        self.link.send("tcp", encode_frame(frame))

    def _piece(self, op: TransferOp, pairs: RangePairs) -> Piece:
        keys = {region_id: self._remote[region_id].key(op) for region_id in distinct(pairs.remote.region_ids)}
        addresses = {i: self._regions[i].address for i in distinct(pairs.local.region_ids)}
        return Piece(
            PackedRanges.pack(pairs.remote, keys),
            addresses_of(pairs.local, addresses),
            pairs.lengths,
            pairs.total_bytes,
        )


class Nothing:
    """Moves nothing."""

    def run_now(self) -> bool:
        return True

    async def run(self) -> None: ...


class SmallMove:
    """Goes over the link, in one message."""

    def __init__(self, channel: TcpChannel, op: TransferOp, piece: Piece, *, checksum: bool) -> None:
        self._ask = channel.get if op is TransferOp.READ else channel.put
        self._piece = piece
        self._checksum = checksum

    def run_now(self) -> bool:
        return False

    async def run(self) -> None:
        await self._ask(self._piece, checksum=self._checksum)


class LargeMove:
    """Goes over streams, in pieces."""

    def __init__(self, channel: TcpChannel, op: TransferOp, pieces: list[Piece], *, checksum: bool) -> None:
        self._channel = channel
        self._op = op
        self._pieces = pieces
        self._checksum = checksum

    def run_now(self) -> bool:
        return False

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for piece in self._pieces:
                    group.create_task(self._channel.push(self._op, piece, checksum=self._checksum))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None


def _error_of(info: ErrorInfo) -> PenstockError:
    error = from_info(info)
    return error if isinstance(error, TransferError) else TransferError(error.message)
