"""How a peer comes to map an arena: it shows the keys of a region over a unix socket and gets the file descriptor.

One question is answered after the other. Over another kind of socket no descriptor can be sent; the answer then only
says that the peer may.
"""

import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from typing import Annotated, TypeVar

import msgspec

from penstock.core.descriptors import TransferOp
from penstock.core.errors import ErrorInfo, PeerLost, ProtocolError
from penstock.core.wire import Wire, encode

UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
"""What msgpack that is none raises."""
_LENGTH = struct.Struct("<I")
_FRAME_BYTES_MAX = 4096
_FDS_MAX = 1
"""Descriptors that have come and that nobody took yet; one comes with each grant, and one question is asked at a time."""
_T = TypeVar("_T", bound=Wire)


class Ask(Wire, frozen=True):
    """May I use this region of yours? `number` comes back with the answer.

    `read_key` and `write_key` show that it was given to read and to write; one of them may be empty.
    """

    number: int
    region_id: Annotated[int, msgspec.Meta(ge=0)]
    read_key: bytes = b""
    write_key: bytes = b""

    @property
    def keys(self) -> dict[TransferOp, bytes]:
        """Those that are shown, by direction."""
        keys = {TransferOp.READ: self.read_key, TransferOp.WRITE: self.write_key}
        return {op: key for op, key in keys.items() if key}


class Grant(Wire, frozen=True):
    """You may, or `error`. With `has_fd` the descriptor of its arena comes along, open for writing too if `writable`.

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

    def __init__(self, stream: socket.socket, *, takes_fds: bool) -> None:
        """Own a connected non-blocking socket.

        Args:
            stream: the socket.
            takes_fds: whether descriptors are to come this way; where not, the kernel closes what is attached.
        """
        self._takes_fds = takes_fds
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
            self._close_fds()

    async def _read(self) -> None:
        if self._is_closing:
            raise PeerLost("the stream that grants memory was closed")
        self._is_reading = True
        try:
            await _readable(self._stream)
            data = self._receive_some()
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLost(f"the stream that grants memory: {error}") from error
        finally:
            self._is_reading = False
            self._close_if_asked()
        if len(self._fds) > _FDS_MAX:
            self._close_fds()
            raise ProtocolError("a descriptor that nobody asked for came with an answer about memory")
        if not data:
            raise PeerLost("the stream that grants memory was closed")
        self._data += data

    def _receive_some(self) -> bytes:
        if not self._takes_fds:
            return self._stream.recv(_FRAME_BYTES_MAX)  # without room for descriptors the kernel closes them
        data, fds, _, _ = socket.recv_fds(self._stream, _FRAME_BYTES_MAX, _FDS_MAX, socket.MSG_CMSG_CLOEXEC)
        self._fds.extend(fds)
        return data

    def _close_fds(self) -> None:
        while self._fds:
            os.close(self._fds.popleft())


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
