"""How a peer comes to map an arena: it shows the key of a region over a unix socket and gets the file descriptor.

One question is answered after the other. Over another kind of socket no descriptor can be sent; the answer then only
says that the peer may.
"""

import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from typing import TypeVar

import msgspec

from penstock.core.descriptors import TransferOp
from penstock.core.errors import ErrorInfo, PeerLost, ProtocolError
from penstock.core.wire import Wire, encode

UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
"""What msgpack that is none raises."""
_LENGTH = struct.Struct("<I")
_FRAME_BYTES_MAX = 4096
_T = TypeVar("_T", bound=Wire)


class Ask(Wire, frozen=True):
    """May I read, or write, this region of yours? `number` comes back with the answer."""

    number: int
    region_id: int
    key: bytes
    op: TransferOp


class Grant(Wire, frozen=True):
    """You may, or `error`. With `has_fd` the descriptor of its arena comes along, open for writing if `writable`.

    The memory of an arena that `is_resident` was taken, so that looking at all of it takes no more.
    """

    number: int
    arena_bytes: int = 0
    writable: bool = False
    has_fd: bool = False
    is_resident: bool = False
    error: ErrorInfo | None = None


class GrantStream:
    """One end of the socket. A cancelled `receive` loses nothing."""

    def __init__(self, stream: socket.socket) -> None:
        """Own a connected non-blocking socket."""
        self._stream = stream
        self._data = b""
        self._fds: deque[int] = deque()
        self._is_reading = False
        self._is_closing = False

    @property
    def sends_fds(self) -> bool:
        return self._stream.family == socket.AF_UNIX

    def send(self, message: Wire, fd: int | None = None) -> None:
        """Send a message; it is short, and the other side waits for it, so that there is room.

        Raises:
            PeerLost: it does not read, or is gone.
        """
        payload = encode(message)
        data = _LENGTH.pack(len(payload)) + payload
        try:
            sent = self._stream.send(data) if fd is None else socket.send_fds(self._stream, [data], [fd])
        except OSError as error:
            raise PeerLost(f"the stream that grants memory: {error}") from error
        if sent < len(data):
            raise PeerLost("the stream that grants memory is full: the peer does not read")

    async def receive(self, kind: type[_T]) -> _T:
        """Wait for a message.

        Raises:
            PeerLost: the other side closed.
            ProtocolError: it is none.
        """
        while True:
            if len(self._data) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._data)
                if length > _FRAME_BYTES_MAX:
                    raise ProtocolError(
                        f"a message of {length} bytes about memory; at most {_FRAME_BYTES_MAX}"
                    )
                end = _LENGTH.size + length
                if len(self._data) >= end:
                    payload, self._data = self._data[_LENGTH.size : end], self._data[end:]
                    try:
                        return msgspec.msgpack.decode(payload, type=kind)
                    except UNREADABLE as error:
                        raise ProtocolError(f"a message about memory cannot be read: {error}") from error
            await self._read()

    def take_fd(self) -> int:
        """Own the descriptor that came with the last message.

        Raises:
            ProtocolError: none did.
        """
        if not self._fds:
            raise ProtocolError("a grant without the file descriptor that it speaks of")
        return self._fds.popleft()

    def close(self) -> None:
        """Have both sides' `receive` end; where one is under way, it closes the socket when it has."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._close_if_asked()

    def _close_if_asked(self) -> None:
        if self._is_closing and not self._is_reading:
            self._stream.close()
            while self._fds:
                os.close(self._fds.popleft())

    async def _read(self) -> None:
        if self._is_closing:
            raise PeerLost("the stream that grants memory was closed")
        self._is_reading = True
        try:
            await _readable(self._stream)
            data, fds, _, _ = socket.recv_fds(self._stream, _FRAME_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLost(f"the stream that grants memory: {error}") from error
        finally:
            self._is_reading = False
            self._close_if_asked()
        self._fds.extend(fds)
        if not data:
            raise PeerLost("the stream that grants memory was closed")
        self._data += data


async def _readable(stream: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(stream.fileno(), _set, ready)
    try:
        await ready
    finally:
        loop.remove_reader(stream.fileno())


def _set(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)
