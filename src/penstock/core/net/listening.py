"""Opening and connecting sockets by `Address`, TCP and Unix alike."""

import asyncio
import contextlib
import errno
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from penstock.core.errors import ConfigError
from penstock.core.log import get_logger
from penstock.core.net.address import Address

P = TypeVar("P", bound=asyncio.BaseProtocol)
BACKLOG = 1024  # a whole fleet reconnects at once after a restart
_ACCEPTS_MAX = 64  # in one turn of the loop: 3 ms with their protocols (2 cores of an AMD EPYC)
_BACK_OFF_S = 0.25
_LOG_EVERY_S = 10.0
_CLIENT_GONE = frozenset(
    {errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EINTR}
)  # of one connection alone

_log = get_logger()


class Listener:
    """Listening sockets whose connections become the event loop's, until `close`. One event loop owns it.

    Each turn of the loop takes all connections that wait, up to a bound. uvloop's own servers take one, so that a burst
    beside many streams waits for as many turns as it has connections.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        factory: Callable[[], asyncio.BaseProtocol],
        *,
        on_failure: Callable[[OSError], None] | None = None,
    ) -> None:
        """Begin to accept.

        Args:
            sockets: bound, not yet listening; the listener closes them.
            factory: makes a connection's protocol.
            on_failure: hears each time that this process can accept nothing more, as for want of descriptors.
        """
        self._loop = asyncio.get_running_loop()
        self._sockets = list(sockets)
        self._factory = factory
        self._on_failure = on_failure
        self._handing_over: set[asyncio.Task[None]] = set()
        self._waiting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._logged_s: float | None = None
        self.failures = 0
        for listening in self._sockets:
            listening.setblocking(False)
            listening.listen(BACKLOG)
            self._loop.add_reader(listening, self._accept, listening)

    def close(self) -> None:
        """Take the connections that wait already, and no others. Safe twice."""
        sockets, self._sockets = self._sockets, []
        for listening in sockets:
            timer = self._waiting.pop(listening, None)
            if timer is not None:
                timer.cancel()
            else:
                self._loop.remove_reader(listening)
                self._accept(listening, most=BACKLOG)
                self._loop.remove_reader(listening)
            listening.close()
        for timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()

    async def wait_closed(self) -> None:
        """Wait until the connections accepted have their protocols."""
        if self._handing_over:
            await asyncio.wait(self._handing_over)

    def _accept(self, listening: socket.socket, *, most: int = _ACCEPTS_MAX) -> None:
        for _ in range(most):
            try:
                connection, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _CLIENT_GONE:
                    continue
                self._back_off(listening, error)
                return
            task = self._loop.create_task(self._hand_over(connection))
            self._handing_over.add(task)
            task.add_done_callback(self._handing_over.discard)

    async def _hand_over(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._factory, connection)
        except OSError:  # the client has gone meanwhile
            connection.close()

    def _back_off(self, listening: socket.socket, error: OSError) -> None:
        """Accept nothing for a moment: what failed would fail again at once, and the socket stays readable."""
        self.failures += 1
        self._loop.remove_reader(listening)
        self._waiting[listening] = self._loop.call_later(_BACK_OFF_S, self._go_on, listening)
        if self._on_failure is not None:
            self._on_failure(error)
        now_s = self._loop.time()
        if self._logged_s is None or now_s >= self._logged_s + _LOG_EVERY_S:
            self._logged_s = now_s
            _log.error(
                "accept_failed",
                address=_name_of(listening),
                error=error.strerror,
                failures=self.failures,
                retry_after_s=_BACK_OFF_S,
                fix="raise the limit of open files (ulimit -n), or run more processes",
            )

    def _go_on(self, listening: socket.socket) -> None:
        del self._waiting[listening]
        self._loop.add_reader(listening, self._accept, listening)


async def listen(
    factory: Callable[[], asyncio.BaseProtocol],
    address: Address,
    *,
    on_failure: Callable[[OSError], None] | None = None,
) -> tuple[Listener, Address]:
    """Open a listening socket; a Unix one is for this user only. `on_failure` is as of `Listener`.

    Returns:
        the listener, and the address with its real port.

    Raises:
        ConfigError: the address is in use, not allowed or not of this host.
    """
    sockets: list[socket.socket] = []
    try:
        if address.path:
            _claim(address)
            sockets.append(_bind(socket.AF_UNIX, address.path))
            _protect(address)
            return Listener(sockets, factory, on_failure=on_failure), address
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, place in dict.fromkeys(found):
            sockets.append(_bind(family, place))
        listener = Listener(sockets, factory, on_failure=on_failure)
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise ConfigError(
            f"{address}: cannot listen: {error.strerror or error}; choose another address, or port 0 for any free one"
        ) from error
    return listener, replace(address, port=sockets[0].getsockname()[1])


async def dial(factory: Callable[[], P], address: Address) -> P:
    """Connect.

    Raises:
        OSError: nobody answers there.
    """
    loop = asyncio.get_running_loop()
    if address.path:
        _, protocol = await loop.create_unix_connection(factory, address.path)
    else:
        _, protocol = await loop.create_connection(factory, address.host, address.port)
    return protocol


def remove_socket(address: Address) -> None:
    """Remove a Unix socket's file if it is there; anything else at that path stays."""
    if address.path:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(Path(address.path).stat().st_mode):
                Path(address.path).unlink()


def _claim(address: Address) -> None:
    """Remove the socket of a process that has died without doing so."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        if probe.connect_ex(address.path) in {0, errno.EAGAIN}:
            raise OSError(errno.EADDRINUSE, "another process listens there")
    remove_socket(address)


def _protect(address: Address) -> None:
    Path(address.path).chmod(0o600)


def _bind(family: int, place: Any) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has a socket of its own
        opened.bind(place)
    except OSError:
        opened.close()
        raise
    return opened


def _name_of(listening: socket.socket) -> str:
    place = listening.getsockname()
    return place if isinstance(place, str) else f"{place[0]} port {place[1]}"
