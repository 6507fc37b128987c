"""Listening sockets of an agent, and connections to those of a peer. Links, and the streams of links, use the same addresses."""

import asyncio
import contextlib
import hashlib
import socket
import ssl
import struct
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from penstock.core.errors import ConfigError, PeerLost, PenstockError, ProtocolError, TransferRefused
from penstock.core.framing import NONCE_BYTES, check_proof, new_nonce, prove
from penstock.core.listening import Address
from penstock.core.log import get_logger
from penstock.transfer.config import SAME_HOST, TlsIdentity
from penstock.transfer.link.frames import Welcome, link_codec, receive_exactly, send_all, shake_hands

_log = get_logger()

_LINK, _TLS_LINK = b"PTA link", b"PTA tlsl"
_STREAM, _TLS_STREAM = b"PTA strm", b"PTA tlss"
_KIND_BYTES = len(_LINK)
_HEADER = struct.Struct("<Q16s32s")
_ACCEPTED = b"\x01"
_BACKLOG = 1024
_UNAUTHENTICATED_MAX = 1024
"""The most connections that have not authenticated; more are closed."""


class Reception(Protocol):
    """Takes what a listener has accepted."""

    def create_task(self, work: Coroutine[object, object, None]) -> "asyncio.Task[None]": ...

    async def link_came(self, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Accept a link, which begins with TLS if there is a context."""
        ...

    def stream_key(self, link_id: int) -> bytes | None:
        """Give the key that opens streams of this link; None if there is no such link."""
        ...

    def stream_came(self, link_id: int, transport: str, connection: socket.socket) -> None:
        """Take ownership of a stream.

        Raises:
            TransferRefused: the link has ended, or this agent does not have the transport.
        """
        ...

    def unauthenticated_refused(self, error: PenstockError, where: str) -> None:
        """Count a connection that did not authenticate."""
        ...


class Listener:
    """The listening sockets of one agent."""

    def __init__(
        self, token: bytes, reception: "Reception", timeout_s: float, tls: TlsIdentity | None = None
    ) -> None:
        """Open nothing.

        Args:
            token: of the agent; names its unix socket.
            reception: gets accepted connections.
            timeout_s: the longest time for a connection to authenticate.
            tls: the certificate for TCP; None for no TLS.
        """
        self._token = token
        self._reception = reception
        self._timeout_s = timeout_s
        self._tls = tls
        self._accepting: list[asyncio.Task[None]] = []
        self._unauthenticated = 0

    def open(self, addresses: tuple[str, ...], tasks: "Reception") -> list[str]:
        """Listen, and accept in tasks.

        Returns:
            the addresses with their real ports.

        Raises:
            ConfigError: an address is in use, or not of this host.
        """
        real: list[str] = []
        for text in addresses:
            listening = _listening_socket(text, self._token)
            real.append(text if text == SAME_HOST else _address_of(listening))
            accepting = tasks.create_task(self._accept(listening, tasks))
            accepting.add_done_callback(partial(_close, listening))  # not while the loop watches it
            self._accepting.append(accepting)
        return real

    def close(self) -> None:
        """Stop listening, in the next turn of the loop."""
        for accepting in self._accepting:
            accepting.cancel()

    async def _accept(self, listening: socket.socket, tasks: "Reception") -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # too many open files, or an end that was gone already
                _log.warning("transfer_accept_failed", error=str(error))
                await asyncio.sleep(0.1)
                continue
            if self._unauthenticated >= _UNAUTHENTICATED_MAX:
                connection.close()
                continue
            connection.setblocking(False)
            self._unauthenticated += 1
            tasks.create_task(self._take(connection))

    async def _take(self, connection: socket.socket) -> None:
        where = _name_of(connection)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._authenticate(connection)
        except (OSError, EOFError, TimeoutError) as error:
            connection.close()
            _log.info("transfer_connection_ended", peer=where, error=str(error) or type(error).__name__)
        except (ProtocolError, TransferRefused) as error:
            connection.close()
            self._reception.unauthenticated_refused(error, where)
        except BaseException:
            connection.close()
            raise
        finally:
            self._unauthenticated -= 1

    async def _authenticate(self, connection: socket.socket) -> None:
        kind = await receive_exactly(connection, _KIND_BYTES)
        if kind not in {_LINK, _TLS_LINK, _STREAM, _TLS_STREAM}:
            raise ProtocolError(f"{kind!r} instead of a link or a stream; is that an agent of Penstock?")
        tls = self._tls if connection.family != socket.AF_UNIX else None
        if (tls is not None) != (kind in {_TLS_LINK, _TLS_STREAM}):
            error = ProtocolError(
                "it connects without TLS, and this agent has `tls`: give both the deployment's certificates"
                if tls
                else "it connects with TLS, and this agent has no `tls`: give both the deployment's certificates"
            )
            with contextlib.suppress(OSError):
                connection.send(link_codec().encode(Welcome(error=error.to_info())))
            raise error
        if kind in {_LINK, _TLS_LINK}:
            await self._reception.link_came(connection, tls.server if tls else None)
        elif tls is None:
            await self._take_stream(connection)
        else:
            secure = tls.wrap(connection, server_side=True)
            try:
                await shake_hands(secure)
                await self._take_stream(secure)
            except BaseException:
                secure.close()
                raise

    async def _take_stream(self, connection: socket.socket) -> None:
        nonce = new_nonce()  # this side's: a recorded header opens nothing
        await send_all(connection, nonce)
        link_id, transport, proof = _HEADER.unpack(await receive_exactly(connection, _HEADER.size))
        key = self._reception.stream_key(link_id)
        unknown = f"a stream of link {link_id}, which is not known, or not known to the caller"
        if key is None:
            raise ProtocolError(unknown)
        check_proof(proof, _prove_stream(key, nonce, link_id, transport), unknown)
        await send_all(connection, _ACCEPTED)
        name = transport.rstrip(b"\0").decode("ascii", "replace")
        self._reception.stream_came(link_id, name, connection)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A peer's listening address, for connecting to it.

    Attributes:
        address: `unix` or `tcp://HOST:PORT`.
        token: the peer's.
        tls: this agent's certificate; None for no TLS.
        certificate: fingerprint of the peer's certificate.
    """

    address: str
    token: bytes
    tls: TlsIdentity | None = None
    certificate: bytes = b""

    def check_certificate(self, shown: bytes | None) -> None:
        """Check the peer's certificate, in DER.

        Raises:
            ProtocolError: its metadata names another certificate.
        """
        if self.tls is not None:
            self.tls.check_peer(shown, self.certificate)

    async def open_link(self, timeout_s: float) -> socket.socket:
        """Connect for a link; with TLS, the TLS handshake comes next.

        Raises:
            PeerLost: nobody answers in time.
        """
        connection = await self._connect(timeout_s)
        try:
            await send_all(connection, _TLS_LINK if self.tls else _LINK)
        except OSError as error:
            connection.close()
            raise PeerLost(f"{self.address}: {error}") from error
        return connection

    async def open_stream(self, link_id: int, key: bytes, transport: str, timeout_s: float) -> socket.socket:
        """Connect for a stream of a link.

        Raises:
            PeerLost: nobody answers in time, or the peer refuses.
            ProtocolError: its metadata names another certificate.
        """
        padded = transport.encode("ascii").ljust(16, b"\0")
        connection = await self._connect(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                if self.tls is None:
                    await send_all(connection, _STREAM)
                else:
                    await send_all(connection, _TLS_STREAM)
                    connection = secure = self.tls.wrap(connection, server_side=False)
                    await shake_hands(secure)
                    self.check_certificate(secure.getpeercert(binary_form=True))
                nonce = await receive_exactly(connection, NONCE_BYTES)
                proof = _prove_stream(key, nonce, link_id, padded)
                await send_all(connection, _HEADER.pack(link_id, padded, proof))
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
        connection: socket.socket | None = None
        try:
            async with asyncio.timeout(timeout_s):
                family, where = await asyncio.to_thread(_place, self.address, self.token)
                connection = socket.socket(family, socket.SOCK_STREAM)
                connection.setblocking(False)
                await asyncio.get_running_loop().sock_connect(connection, where)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, OSError):  # a timeout is one, too
                raise PeerLost(
                    f"{self.address}: {str(error) or f'no answer within {timeout_s:g} s'}"
                ) from error
            raise
        if family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def _address_of(listening: socket.socket) -> str:
    """Give the address for this agent's metadata.

    For a socket that listens at all addresses, this is the host's address on the route to other hosts.
    """
    is_v4 = listening.family == socket.AF_INET
    host, port = listening.getsockname()[:2]
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - to be replaced
        with socket.socket(listening.family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1" if is_v4 else "2001:db8::1", 9))  # reserved; nothing is sent there
                host = probe.getsockname()[0]
            except OSError:  # no way to others: peers are on this host
                host = "127.0.0.1" if is_v4 else "::1"
    return str(Address(host=host, port=port))


def _close(listening: socket.socket, _: "asyncio.Task[None]") -> None:
    listening.close()


def _name_of(connection: socket.socket) -> str:
    try:
        place = connection.getpeername()
    except OSError:
        return "somebody who left"
    return f"{place[0]}:{place[1]}" if isinstance(place, tuple) else "a process of this host"


def _abstract_name(token: bytes) -> str:
    """Name the abstract unix socket of an agent. It ends with the process, and is local to the network namespace.

    The name is a hash of the token, since every process of the host can list abstract names.
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
    """Resolve an address, which may block."""
    if text == SAME_HOST:
        return socket.AF_UNIX, _abstract_name(token)
    address = Address.parse(text, source="agent address")
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerLost(f"{text}: {error.strerror or error}; is the host's name right?") from error
    family, _, _, _, where = found[0]
    return family, (str(where[0]), int(where[1]))


def _prove_stream(key: bytes, nonce: bytes, link_id: int, transport: bytes) -> bytes:
    return prove(key, b"", nonce, link_id.to_bytes(8, "little"), transport)
