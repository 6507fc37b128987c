"""Grants of memory: a peer shows the keys of regions and gets what accesses them: NIXL's metadata, a file descriptor.

Each request has a connection of its own, a stream of the link, which closes after the answer. A cancelled request closes its
connection, so no answer is taken for another request's, and the kernel closes a descriptor that nobody received.
"""

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypeVar

import msgspec
import numpy as np

from penstock.core.descriptors import Descriptors, Granted, TransferOp
from penstock.core.errors import ErrorInfo, PenstockError, ProtocolError, TransferError, TransferRefused
from penstock.core.wire import Wire, encode
from penstock.seams import Link, Transport, TransportHost
from penstock.transfer.link.frames import FRAME_BYTES_MAX, receive_exactly, receive_with_descriptor, send_all

GRANTS = "grants"
"""The name of streams that carry requests; other streams have the name of their transport."""
_LENGTH = struct.Struct("<I")
_REQUESTS_MAX = 256
"""The most unanswered requests of one link."""
_REQUEST_BYTES_MAX = 2 << 20
"""The longest request lists 65,536 ranges for checksums."""
_W = TypeVar("_W", bound=Wire)
_RegionId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class GrantRequest(Wire, frozen=True):
    """Asks the owner's transport for access. `keys` are the regions' keys by direction, `payload` is the transport's own."""

    transport: str
    keys: dict[TransferOp, dict[_RegionId, bytes]] = msgspec.field(default_factory=dict)
    payload: bytes = b""


class Grant(Wire, frozen=True):
    """The answer: the transport's `payload`, with a file descriptor beside it if `has_descriptor`; or `error`."""

    payload: bytes = b""
    has_descriptor: bool = False
    error: ErrorInfo | None = None


class GrantOwner(TransportHost, Protocol):
    """The part of the agent that grants use."""

    def transport(self, name: str) -> Transport | None: ...


@dataclass(slots=True, eq=False)
class Grants:
    """The owner's side: answers requests, and records which regions each peer can access by itself. The event loop owns it."""

    owner: GrantOwner
    timeout_s: float
    """The longest time for a peer to send a request, or to receive the answer."""
    _granted: dict[Link, set[int]] = field(default_factory=dict)
    _answering: Counter[Link] = field(default_factory=Counter)

    def to(self, link: Link) -> Collection[int]:
        """List the regions that this link's initiator was granted."""
        return self._granted.get(link, ())

    def revoke(self, region_id: int) -> None:
        """Forget a region that no peer uses any more."""
        for granted in self._granted.values():
            granted.discard(region_id)

    def lost(self, link: Link) -> None:
        """Forget a link that has ended."""
        self._granted.pop(link, None)

    def check_room(self, link: Link) -> None:
        """Check that the link may have one more request.

        Raises:
            TransferRefused: too many are unanswered (256).
        """
        if self._answering[link] >= _REQUESTS_MAX:
            raise TransferRefused(f"agent {link.peer}: more than {_REQUESTS_MAX} requests for memory at once")

    async def answer(self, link: Link, request: GrantRequest) -> Granted:
        """Check the keys of a request and have the transport answer it.

        Returns:
            the answer; its descriptor is the caller's to close.

        Raises:
            TransferRefused: a region was not given for this direction, or is deregistered.
            TransferError: the transport cannot answer.
        """
        for op, keys in request.keys.items():
            nothing = np.zeros(len(keys), np.uint64)
            ids = np.array(list(keys), np.uint64)
            self.owner.authorize(link.peer, keys, Descriptors(ids, nothing, nothing), op)
        transport = self.owner.transport(request.transport)
        if transport is None:
            raise TransferRefused(f"transport {request.transport!r}: this agent does not have it")
        granted = await transport.grant(link, request.keys, request.payload)
        region_ids = {region_id for keys in request.keys.values() for region_id in keys}
        try:
            self._check_still(link, region_ids)
        except PenstockError:
            granted.close()
            raise
        self._granted.setdefault(link, set()).update(region_ids)
        return granted

    def _check_still(self, link: Link, region_ids: Collection[int]) -> None:
        """Check that no region was deregistered meanwhile and that the link lives."""
        for region_id in region_ids:
            self.owner.region(region_id)
        if link.error is not None:
            raise link.error

    async def serve(self, link: Link, connection: socket.socket) -> None:
        """Answer the one request of a connection, and close it."""
        self._answering[link] += 1
        granted = Granted()
        try:
            async with asyncio.timeout(self.timeout_s):
                request = await _receive(connection, GrantRequest, _REQUEST_BYTES_MAX)
            try:
                granted = await self.answer(link, request)
                answer = Grant(payload=granted.payload, has_descriptor=granted.descriptor is not None)
            except TransferError as error:
                answer = Grant(error=error.to_info())
            async with asyncio.timeout(self.timeout_s):
                await _send(connection, answer, granted.descriptor)
        except ProtocolError as error:
            self.owner.refused(error, link.peer)
        except (OSError, EOFError):  # it left, or is too slow
            pass
        finally:
            granted.close()
            connection.close()
            self._answering[link] -= 1
            if not self._answering[link]:
                del self._answering[link]


async def request_over(connection: socket.socket, request: GrantRequest) -> tuple[Grant, Granted]:
    """Send a request over a connection of its own and wait for the answer.

    Returns:
        the answer, and what came with it; its descriptor is the caller's to close.

    Raises:
        OSError, EOFError: the owner is gone.
        ProtocolError: the answer is none.
    """
    await _send(connection, request)
    first, descriptor = b"", None
    if connection.family == socket.AF_UNIX:
        first, descriptor = await receive_with_descriptor(connection)
    granted = Granted(descriptor=descriptor)
    try:
        answer = await _receive(connection, Grant, FRAME_BYTES_MAX, first)
    except BaseException:
        granted.close()
        raise
    if answer.has_descriptor != (descriptor is not None):
        granted.close()
        raise ProtocolError("an answer about memory and its file descriptor did not come together")
    return answer, Granted(answer.payload, descriptor)


async def _send(connection: socket.socket, message: Wire, descriptor: int | None = None) -> None:
    payload = encode(message)
    data = _LENGTH.pack(len(payload)) + payload
    if descriptor is not None:  # with the first byte, for which a new connection has room
        sent = socket.send_fds(connection, [data[:1]], [descriptor])
        data = data[sent:]
    await send_all(connection, data)


async def _receive(connection: socket.socket, kind: type[_W], bytes_max: int, first: bytes = b"") -> _W:
    """Receive a message that begins with `first`, which has arrived already.

    Raises:
        ProtocolError: it is too long, or none.
        EOFError: the other end closed before.
    """
    head = first + await receive_exactly(connection, _LENGTH.size - len(first))
    (length,) = _LENGTH.unpack(head)
    if length > bytes_max:
        raise ProtocolError(f"a message of {length} bytes about memory; at most {bytes_max}")
    payload = await receive_exactly(connection, length)
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a message about memory cannot be read: {error}") from error
