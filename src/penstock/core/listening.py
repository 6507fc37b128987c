"""Addresses of processes, listening sockets, and connections to them."""

import asyncio
import contextlib
import errno
import ipaddress
import socket
import ssl
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from penstock.core.errors import ConfigError
from penstock.core.log import get_logger


@dataclass(frozen=True, slots=True)
class Address:
    """TCP `host` and `port` (0: any free port), or the `path` of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str, *, source: str = "address") -> Self:
        """Parse an address.

        Raises:
            ConfigError: `text` is no address; `source` names the setting.
        """
        expected = "expected tcp://HOST:PORT or unix:///PATH"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{source}: {text!r}: {error}; {expected}") from error
        if parts.scheme == "unix" and parts.path.startswith("/") and not parts.netloc:
            return cls(path=parts.path)
        if parts.scheme == "tcp" and parts.hostname and port is not None and not parts.path:
            return cls(host=parts.hostname, port=port)
        raise ConfigError(f"{source}: {text!r} is no address; {expected}")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect: a Unix path, a loopback address or `localhost`."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a host name

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


P = TypeVar("P", bound=asyncio.BaseProtocol)
BACKLOG = 1024  # a whole fleet reconnects at once after a restart
_ACCEPTS_MAX = 64  # in one turn of the loop: 3 ms, protocols included (2 cores of an AMD EPYC)
_BACK_OFF_S = 0.25
_LOG_EVERY_S = 10.0
_CLIENT_GONE = frozenset({errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EINTR})
"""Errors of `accept` that concern one connection only."""

_log = get_logger()


class Listener:
    """Accepts connections on listening sockets until `close`. One event loop owns it.

    Each turn of the loop accepts up to 64 waiting connections. uvloop's own servers accept one a turn, so beside many
    streams a burst of n connections would wait for n turns.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        factory: Callable[[], asyncio.BaseProtocol],
        *,
        on_failure: Callable[[OSError], None] | None = None,
        tls: ssl.SSLContext | Callable[[], ssl.SSLContext] | None = None,
        handshake_timeout_s: float = 10.0,
        tells_refused: bool = False,
        on_refused: Callable[[str, OSError], None] = lambda _peer, _error: None,
    ) -> None:
        """Start to accept.

        Args:
            sockets: bound, not yet listening; the listener closes them.
            factory: makes the protocol of a connection.
            on_failure: called when this process cannot accept connections, for example without free file descriptors.
            tls: for TLS on all connections, or what gives it for each new one; None for none.
            handshake_timeout_s: longest time of a TLS handshake; then the connection is closed.
            tells_refused: whether failed TLS handshakes are logged, at most one in 10 s, for a port that only this deployment uses.
            on_refused: called with each peer whose TLS handshake failed, and why.
        """
        self._loop = asyncio.get_running_loop()
        self._sockets = list(sockets)
        self._factory = factory
        self._on_failure = on_failure
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._tells_refused = tells_refused and tls is not None
        self._on_refused = on_refused
        self._attaching: set[asyncio.Task[None]] = set()
        self._waiting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._logged_s: float | None = None
        self._refused_logged_s: float | None = None
        self.failures = 0
        self.refused = 0
        """Connections whose TLS handshake failed, where these are logged."""
        for listening in self._sockets:
            listening.setblocking(False)
            listening.listen(BACKLOG)
            self._loop.add_reader(listening, self._accept, listening)

    def close(self) -> None:
        """Accept the connections that wait already, then close the sockets. Safe twice."""
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
        """Wait until all accepted connections have their protocols."""
        if self._attaching:
            await asyncio.wait(self._attaching)

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
            task = self._loop.create_task(self._attach_protocol(connection))
            self._attaching.add(task)
            task.add_done_callback(self._attaching.discard)

    async def _attach_protocol(self, connection: socket.socket) -> None:
        peer = _peer_of(connection)
        try:
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._factory, connection, **self._handshake())
        except OSError as error:  # the client has gone meanwhile, or a TLS handshake failed
            connection.close()
            if self._tls is not None:
                self._on_refused(peer, error)
            if self._tells_refused:
                self._note_refused(peer, error)

    def _note_refused(self, peer: str, error: OSError) -> None:
        self.refused += 1
        now_s = self._loop.time()
        if self._refused_logged_s is None or now_s >= self._refused_logged_s + _LOG_EVERY_S:
            self._refused_logged_s = now_s
            _log.warning(
                "tls_refused",
                peer=peer,
                error=_why(error),
                refused=self.refused,
                fix="give both sides certificates of the same authority that have not expired, or neither",
            )

    def _handshake(self) -> dict[str, Any]:
        if self._tls is None:
            return {}
        tls = self._tls if isinstance(self._tls, ssl.SSLContext) else self._tls()
        return {"ssl": tls, "ssl_handshake_timeout": self._handshake_timeout_s}

    def _back_off(self, listening: socket.socket, error: OSError) -> None:
        """Stop accepting for a moment: the socket stays readable, and a retry at once would fail again."""
        self.failures += 1
        self._loop.remove_reader(listening)
        self._waiting[listening] = self._loop.call_later(_BACK_OFF_S, self._resume, listening)
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

    def _resume(self, listening: socket.socket) -> None:
        del self._waiting[listening]
        self._loop.add_reader(listening, self._accept, listening)


async def listen(
    factory: Callable[[], asyncio.BaseProtocol],
    address: Address,
    *,
    on_failure: Callable[[OSError], None] | None = None,
    tls: Callable[[], ssl.SSLContext] | None = None,
    handshake_timeout_s: float = 10.0,
    on_refused: Callable[[str, OSError], None] = lambda _peer, _error: None,
) -> tuple[Listener, Address]:
    """Listen on an address; only this user may connect to a Unix socket.

    Args:
        factory: makes the protocol of a connection.
        address: where to listen.
        on_failure: see `Listener`.
        tls: see `Listener`; a Unix socket has none.
        handshake_timeout_s: longest time of a TLS handshake.
        on_refused: see `Listener`.

    Returns:
        the listener, and the address with the actual port.

    Raises:
        ConfigError: the address is in use, not allowed or not of this host.
    """
    sockets: list[socket.socket] = []
    try:
        if address.path:
            _remove_stale_socket(address)
            sockets.append(_bind(socket.AF_UNIX, address.path))
            return Listener(sockets, factory, on_failure=on_failure), address
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, socket_address in dict.fromkeys(found):
            sockets.append(_bind(family, socket_address))
        listener = Listener(
            sockets,
            factory,
            on_failure=on_failure,
            tls=tls,
            handshake_timeout_s=handshake_timeout_s,
            tells_refused=True,
            on_refused=on_refused,
        )
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise ConfigError(
            f"{address}: cannot listen: {error.strerror or error}; choose another address, or port 0 for any free one"
        ) from error
    return listener, replace(address, port=sockets[0].getsockname()[1])


async def dial(factory: Callable[[], P], address: Address, *, tls: ssl.SSLContext | None = None) -> P:
    """Connect to an address, by TLS where it is given and the address is no Unix path; return the protocol of `factory`.

    Raises:
        OSError: nothing accepts connections there.
    """
    loop = asyncio.get_running_loop()
    if address.path:
        _, protocol = await loop.create_unix_connection(factory, address.path)
    else:
        name = None if tls is None else address.host
        _, protocol = await loop.create_connection(
            factory, address.host, address.port, ssl=tls, server_hostname=name
        )
    return protocol


def remove_socket(address: Address) -> None:
    """Remove the file of a Unix socket if it exists; a file of another kind at that path stays."""
    if address.path:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(Path(address.path).stat().st_mode):
                Path(address.path).unlink()


def _remove_stale_socket(address: Address) -> None:
    """Remove the socket file that a dead process has left behind.

    Raises:
        OSError: a living process listens there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        if probe.connect_ex(address.path) in {0, errno.EAGAIN}:
            raise OSError(errno.EADDRINUSE, "another process listens there")
    remove_socket(address)


def _bind(family: int, socket_address: Any) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has a socket of its own
        opened.bind(socket_address)
        if family == socket.AF_UNIX:
            Path(socket_address).chmod(0o600)
    except OSError:
        opened.close()
        raise
    return opened


def _why(error: OSError) -> str:
    """Say why a TLS handshake failed; what is wrong with a certificate, in OpenSSL's words, such as `certificate has expired`."""
    verification = getattr(error, "verify_message", None)
    return verification or getattr(error, "reason", None) or str(error) or type(error).__name__


def _name_of(listening: socket.socket) -> str:
    name = listening.getsockname()
    return name if isinstance(name, str) else f"{name[0]} port {name[1]}"


def _peer_of(connection: socket.socket) -> str:
    with contextlib.suppress(OSError):
        peer = connection.getpeername()
        return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "unix socket"
    return "gone"


PROBE_S = 2
"""Silence after which the kernel asks whether the other host is there, and the time between two such questions."""
PROBES = 3
"""So many questions without an answer end a connection, or as much time without one to data that was sent."""
AddressInfo = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]
"""As `socket.getaddrinfo` gives it."""


def keepalive_socket(address: AddressInfo) -> socket.socket:
    """Make a TCP socket that the kernel probes after 2 s of silence, and ends 6 s later without an answer; likewise for data not acknowledged in 6 s."""
    made = socket.socket(address[0], address[1], address[2])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PROBES * PROBE_S * 1000)
    return made
