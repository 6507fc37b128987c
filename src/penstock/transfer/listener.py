"""Where an agent listens, and how its peers connect: links, and streams that belong to a link, on the same addresses."""

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Protocol

from penstock.core.address import Address
from penstock.core.errors import ConfigError, PeerLost, ProtocolError, TransferRefused
from penstock.core.log import get_logger
from penstock.transfer.config import SAME_HOST
from penstock.transfer.frames import NONCE_BYTES

_log = get_logger()

_LINK = b"PTA link"
_STREAM = b"PTA strm"
_KIND_BYTES = len(_LINK)
_HEADER = struct.Struct(f"<Q{NONCE_BYTES}s16s32s")
_ACCEPTED = b"\x01"
_BACKLOG = 1024


class TaskStarter(Protocol):
    """Runs tasks that end with the agent."""

    def create_task(self, work: Coroutine[object, object, None]) -> None: ...


class Reception(Protocol):
    """Who takes in what connects."""

    async def link_came(self, connection: socket.socket) -> None: ...

    def stream_key(self, link_id: int) -> bytes | None:
        """Give the key that streams of this link are opened with; None if there is no such link."""
        ...

    def stream_came(self, link_id: int, transport: str, connection: socket.socket) -> None:
        """Own a stream.

        Raises:
            TransferRefused: nobody here takes it.
        """
        ...


class Listener:
    """The listening sockets of one agent."""

    def __init__(self, token: bytes, reception: Reception, timeout_s: float) -> None:
        """Open nothing.

        Args:
            token: names the socket for peers of this host.
            reception: takes what connects.
            timeout_s: how long a stranger may take to say what it wants.
        """
        self._token = token
        self._reception = reception
        self._timeout_s = timeout_s
        self._sockets: list[socket.socket] = []

    def open(self, addresses: tuple[str, ...], tasks: "TaskStarter") -> list[str]:
        """Listen, in tasks.

        Returns:
            the addresses with their real ports.

        Raises:
            ConfigError: one is in use, or not of this host.
        """
        real: list[str] = []
        for text in addresses:
            listening = _listening_socket(text, self._token)
            self._sockets.append(listening)
            address = text
            if text != SAME_HOST:
                host, port = listening.getsockname()[:2]
                address = str(Address(host=host, port=port))
            real.append(address)
            tasks.create_task(self._accept(listening, tasks))
        return real

    def close(self) -> None:
        """Stop listening; the tasks end with their group."""
        for listening in self._sockets:
            listening.close()

    async def _accept(self, listening: socket.socket, tasks: "TaskStarter") -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # too many open files, or an end that was gone already
                _log.warning("transfer_accept_failed", error=str(error))
                await asyncio.sleep(0.1)
                continue
            connection.setblocking(False)
            tasks.create_task(self._take(connection))

    async def _take(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                kind = await receive_exactly(connection, _KIND_BYTES)
                if kind == _LINK:
                    await self._reception.link_came(connection)
                    return
                await self._take_stream(connection, kind)
        except (OSError, EOFError, TimeoutError, ProtocolError, TransferRefused) as error:
            _log.warning("transfer_connection_refused", error=str(error) or type(error).__name__)
            connection.close()
        except BaseException:
            connection.close()
            raise

    async def _take_stream(self, connection: socket.socket, kind: bytes) -> None:
        if kind != _STREAM:
            raise ProtocolError(f"{kind!r} instead of a link or a stream")
        header = await receive_exactly(connection, _HEADER.size)
        link_id, nonce, transport, proof = _HEADER.unpack(header)
        key = self._reception.stream_key(link_id)
        if key is None or not hmac.compare_digest(proof, _prove(key, nonce, transport)):
            raise ProtocolError(f"a stream of link {link_id}, which is not known, or not known to the caller")
        await asyncio.get_running_loop().sock_sendall(connection, _ACCEPTED)
        name = transport.rstrip(b"\0").decode("ascii", "replace")
        self._reception.stream_came(link_id, name, connection)


@dataclass(frozen=True, slots=True)
class Door:
    """A peer's listening address, as seen by who connects; `token` is the peer's."""

    address: str
    token: bytes

    @property
    def same_host(self) -> bool:
        return self.address == SAME_HOST

    async def open_link(self, timeout_s: float) -> socket.socket:
        """Connect for a link.

        Raises:
            PeerLost: nobody answers in time.
        """
        connection = await self._connect(timeout_s)
        await asyncio.get_running_loop().sock_sendall(connection, _LINK)
        return connection

    async def open_stream(self, link_id: int, key: bytes, transport: str, timeout_s: float) -> socket.socket:
        """Connect for a stream of a link.

        Raises:
            PeerLost: nobody answers in time, or the peer refuses.
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        padded = transport.encode("ascii").ljust(16, b"\0")
        header = _HEADER.pack(link_id, nonce, padded, _prove(key, nonce, padded))
        connection = await self._connect(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_sendall(connection, _STREAM + header)
                await receive_exactly(connection, len(_ACCEPTED))
        except (OSError, EOFError, TimeoutError) as error:
            connection.close()
            raise PeerLost(
                f"{self.address}: the peer refuses a stream of link {link_id}: {error!r}"
            ) from error
        except BaseException:
            connection.close()
            raise
        return connection

    async def _connect(self, timeout_s: float) -> socket.socket:
        family, where = await asyncio.to_thread(_place, self.address, self.token)
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(connection, where)
        except (OSError, TimeoutError) as error:
            connection.close()
            raise PeerLost(f"{self.address}: {str(error) or f'no answer within {timeout_s:g} s'}") from error
        except BaseException:
            connection.close()
            raise
        if family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


async def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Receive so many bytes and not one more.

    Raises:
        EOFError: the other end closed before.
    """
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < num_bytes:
        more = await loop.sock_recv(connection, num_bytes - len(data))
        if not more:
            raise EOFError(f"closed after {len(data)} of {num_bytes} bytes")
        data += more
    return data


def _abstract_name(token: bytes) -> str:
    """Name the socket of an agent for its own host; abstract: it ends with the process, and with the network namespace.

    It is derived from the token and does not give it away, as every process of the host can list such names.
    """
    return "\0penstock-transfer-" + hashlib.sha256(b"address" + token).hexdigest()[:24]


def _listening_socket(text: str, token: bytes) -> socket.socket:
    try:
        family, where = _place(text, token)
    except PeerLost as error:
        raise ConfigError(f"listen: {error.message}") from error
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"listen: {text}: {error.strerror or error}; choose another address, or port 0 for any free one"
        ) from error
    return listening


def _place(text: str, token: bytes) -> tuple[socket.AddressFamily, tuple[str, int] | str]:
    """Find what the system calls an address; a name may take a while to be resolved."""
    if text == SAME_HOST:
        return socket.AF_UNIX, _abstract_name(token)
    address = Address.parse(text, source="agent address")
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerLost(f"{text}: {error.strerror or error}; is the host's name right?") from error
    family, _, _, _, where = found[0]
    return family, (str(where[0]), int(where[1]))


def _prove(key: bytes, nonce: bytes, transport: bytes) -> bytes:
    return hmac.digest(key, nonce + transport, hashlib.sha256)
