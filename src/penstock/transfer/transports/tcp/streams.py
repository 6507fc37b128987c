"""Sends and receives ranges of memory over a stream socket without an extra copy.

Both calls run until all is moved, without the GIL; call them on threads. Measured over loopback, two processes on two cores
of AMD EPYC:

- The kernel's two copies are the cost: 0.11 to 0.13 CPU seconds per GB to send and 0.14 to 0.16 to receive.
- SO_SNDBUF and SO_RCVBUF are left to the kernel, which grows them: 1 to 4 MiB did no better, and 256 KiB took 1.5 times the
CPU time, since it wakes the other side more often.
- 4 MiB a call did better than 256 KiB; MSG_WAITALL, SO_RCVLOWAT and a blocking socket did not.
- MSG_ZEROCOPY copies over loopback, so that it only adds its notifications.
"""

import ctypes
import math
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from time import perf_counter

from penstock.core.native import native
from penstock.transfer.regions.ranges import Numbers, expect_columns

_CALL_BYTES = 4 << 20
_VECTORS_MAX = 1024


class StreamEnd(Enum):
    """Why a call returned."""

    DONE = 0
    IDLE = 1
    """No byte moved for as long as was allowed."""
    DEADLINE = 2
    CLOSED = 3
    """The peer, or `shutdown` on this side, ended the stream."""
    FAILED = 4


@dataclass(frozen=True, slots=True)
class Streamed:
    """What became of a call.

    Attributes:
        moved_bytes: how many were, from `skip_bytes` on; to go on, add them to it.
        end: why it returned.
        errno: the socket's error where `end` is FAILED, or CLOSED by a reset; else 0.
    """

    moved_bytes: int
    end: StreamEnd
    errno: int


def send_ranges(
    stream: int,
    addresses: Numbers,
    lengths: Numbers,
    *,
    skip_bytes: int = 0,
    idle_s: float = math.inf,
    deadline_s: float = math.inf,
) -> Streamed:
    """Send ranges of memory one after the other, as one run of bytes.

    `shutdown` of the socket on another thread ends the call within microseconds. One call at a time for each
    direction of a socket.

    Args:
        stream: file descriptor of a connected stream socket, blocking or not.
        addresses: (n,) uint64; what is not mapped ends with FAILED and EFAULT.
        lengths: (n,) bytes.
        skip_bytes: leave out so many of the whole, as after an earlier call.
        idle_s: give up when no byte moves for so long.
        deadline_s: give up after so long, bytes moving or not.

    Returns:
        what was moved and why it ended; a broken stream is no exception.

    Raises:
        ValueError: the arrays differ in length.
        TypeError: they are not contiguous uint64.
    """
    if native is None:
        return _move_python(
            stream, _rest(addresses, lengths, skip_bytes), (idle_s, deadline_s), _send, select.POLLOUT
        )
    moved, end, error = native.send_ranges(stream, addresses, lengths, skip_bytes, idle_s, deadline_s)
    return Streamed(moved, StreamEnd(end), error)


def receive_ranges(
    stream: int,
    addresses: Numbers,
    lengths: Numbers,
    *,
    skip_bytes: int = 0,
    idle_s: float = math.inf,
    deadline_s: float = math.inf,
) -> Streamed:
    """Receive a run of bytes into ranges of memory, and not one byte more; see `send_ranges`."""
    if native is None:
        return _move_python(
            stream, _rest(addresses, lengths, skip_bytes), (idle_s, deadline_s), _receive, select.POLLIN
        )
    moved, end, error = native.receive_ranges(stream, addresses, lengths, skip_bytes, idle_s, deadline_s)
    return Streamed(moved, StreamEnd(end), error)


def _send(channel: socket.socket, buffers: list[memoryview]) -> int:
    return channel.sendmsg(buffers, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _receive(channel: socket.socket, buffers: list[memoryview]) -> int:
    return channel.recvmsg_into(buffers, 0, socket.MSG_DONTWAIT)[0]


def _move_python(
    stream: int,
    rest: list[tuple[int, int]],
    patience: tuple[float, float],
    call: Callable[[socket.socket, list[memoryview]], int],
    event: int,
) -> Streamed:
    """Do what the native calls do. `rest` is in reverse; `patience` is (idle_s, deadline_s)."""
    idle_s, deadline_s = patience
    try:
        channel = socket.socket(fileno=stream)
    except OSError as error:
        return Streamed(0, StreamEnd.FAILED, error.errno or 0)
    poll = select.poll()
    poll.register(stream, event)
    start = progress = perf_counter()
    moved = 0
    try:
        while rest:
            if perf_counter() - start >= deadline_s:
                return Streamed(moved, StreamEnd.DEADLINE, 0)
            try:
                done = call(channel, _buffers(rest))
            except BlockingIOError:
                left_s = min(progress + idle_s, start + deadline_s) - perf_counter()
                if progress + idle_s <= perf_counter():
                    return Streamed(moved, StreamEnd.IDLE, 0)
                poll.poll(None if left_s == math.inf else math.ceil(max(left_s, 0.0) * 1000))
                continue
            except OSError as error:
                closed = isinstance(error, BrokenPipeError | ConnectionResetError)
                return Streamed(moved, StreamEnd.CLOSED if closed else StreamEnd.FAILED, error.errno or 0)
            if done == 0:
                return Streamed(moved, StreamEnd.CLOSED, 0)
            _pass(rest, done)
            moved += done
            progress = perf_counter()
    finally:
        channel.detach()
    return Streamed(moved, StreamEnd.DONE, 0)


def _rest(addresses: Numbers, lengths: Numbers, skip_bytes: int) -> list[tuple[int, int]]:
    """List (address, length) of what is to be moved, the next one last."""
    expect_columns(addresses, lengths)
    rest = [row for row in zip(addresses.tolist(), lengths.tolist(), strict=True) if row[1]]
    rest.reverse()
    _pass(rest, skip_bytes)
    return rest


def _buffers(rest: list[tuple[int, int]]) -> list[memoryview]:
    """View the next ranges."""
    buffers = []
    left = _CALL_BYTES
    for address, length in rest[: -_VECTORS_MAX - 1 : -1]:
        size = min(length, left)
        buffers.append(memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B"))
        left -= size
        if not left:
            break
    return buffers


def _pass(rest: list[tuple[int, int]], size: int) -> None:
    while size and rest:
        address, length = rest.pop()
        if length > size:
            rest.append((address + size, length - size))
        size -= min(length, size)
