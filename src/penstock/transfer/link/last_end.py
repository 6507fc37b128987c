"""The socket of a link that has ended, kept to see when the process at its other end is done with this one's memory.

A peer that initiated a link keeps its own end open until none of its transfers uses memory any more. So the end of the
stream says that it has let go, whether it answered, closed or was killed.
"""

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable

_LOOK_S = 0.02
_LOOKS_RISE, _LOOK_S_MAX = 1.5, 0.5
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Seconds, and probes: a host that is gone answers none of them, one whose process was stopped does."""


class LastEnd:
    """Looks now and then whether the other end is closed, and reads nothing that comes meanwhile."""

    def __init__(self, end: socket.socket, closed: Callable[[], None]) -> None:
        """Own a socket, say that nothing more is sent, so that the other side hears of the end, and look at once.

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
        """Look no more. Safe twice."""
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
