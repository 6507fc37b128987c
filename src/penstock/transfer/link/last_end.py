"""The socket of an ended link, kept to learn when the peer's process has stopped using this process's memory.

The initiator keeps its end open until none of its transfers uses memory. So the end of the stream means that the memory is
free, whether the initiator answered, closed or was killed.
"""

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable

_LOOK_S = 0.02
_LOOKS_RISE, _LOOK_S_MAX = 1.5, 0.5
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Seconds, and probes: a host that is down answers none, a host with a stopped process answers."""


class LastEnd:
    """Polls whether the other end is closed; reads nothing that arrives."""

    def __init__(self, end: socket.socket, closed: Callable[[], None]) -> None:
        """Take ownership of a socket, shut down its sending side so that the peer sees the end, and poll at once.

        Args:
            end: this side's.
            closed: called once, in a later turn of the loop or in this one.
        """
        self._end = end
        self._closed = closed
        self._poll = select.poll()
        self._poll.register(end, select.POLLRDHUP)
        self._look_s = _LOOK_S
        self._timer: asyncio.TimerHandle | None = None
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                end.setsockopt(socket.IPPROTO_TCP, option, value)
        with contextlib.suppress(OSError):  # it is closed already
            end.shutdown(socket.SHUT_WR)
        self._look()

    def close(self) -> None:
        """Stop polling and close the socket. Safe twice."""
        if self._timer is not None:
            self._timer.cancel()
        self._end.close()

    def _look(self) -> None:
        if self._poll.poll(0):
            self._end.close()
            self._closed()
            return
        self._timer = asyncio.get_running_loop().call_later(self._look_s, self._look)
        self._look_s = min(self._look_s * _LOOKS_RISE, _LOOK_S_MAX)
