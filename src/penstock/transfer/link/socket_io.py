"""Awaitable sends and receives on non-blocking sockets, with TLS and without; the event loop's own do not take TLS sockets."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Receive exactly `num_bytes`.

    Raises:
        EOFError: the other end closed before.
    """
    data = b""
    while len(data) < num_bytes:
        more = await _done(connection, partial(connection.recv, num_bytes - len(data)), writes=False)
        if not more:
            raise EOFError(f"closed after {len(data)} of {num_bytes} bytes")
        data += more
    return data


async def receive_with_descriptor(connection: socket.socket) -> tuple[bytes, int | None]:
    """Receive one byte over a unix socket, and the file descriptor that came with it; the caller closes it.

    Raises:
        EOFError: the other end closed before.
    """
    receive = partial(socket.recv_fds, connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    data, descriptors, _, _ = await _done(connection, receive, writes=False)
    if not data:
        raise EOFError("closed before an answer came")
    return data, descriptors[0] if descriptors else None


async def send_all(connection: socket.socket, data: bytes) -> None:
    """Send every byte."""
    while data:
        data = data[await _done(connection, partial(connection.send, data), writes=True) :]


async def shake_hands(connection: ssl.SSLSocket) -> None:
    """Run the TLS handshake.

    Raises:
        ssl.SSLError: an OSError; the other end has no valid certificate, or does not speak TLS.
    """
    await _done(connection, connection.do_handshake, writes=False)


async def _done(connection: socket.socket, call: Callable[[], T], *, writes: bool) -> T:
    """Repeat a non-blocking call until it succeeds. `writes` says what a plain socket waits for; a TLS socket says it itself."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return call()
        except BlockingIOError:
            for_room = writes
        except ssl.SSLWantReadError:
            for_room = False
        except ssl.SSLWantWriteError:
            for_room = True
        ready: asyncio.Future[None] = loop.create_future()
        watch, forget = (
            (loop.add_writer, loop.remove_writer) if for_room else (loop.add_reader, loop.remove_reader)
        )
        watch(connection, _set, ready)
        try:
            await ready
        finally:
            forget(connection)


def _set(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)
