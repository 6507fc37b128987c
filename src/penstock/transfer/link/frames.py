"""What agents send over links: frames, an agent's metadata, and how a socket is opened and closed."""

import asyncio
import hashlib
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.core import framing
from penstock.core.descriptors import RegionInfo
from penstock.core.errors import ErrorInfo, ProtocolError
from penstock.core.framing import Challenge, FrameCodec, Goodbye, Ping, Pong
from penstock.core.wire import Wire, encode

FRAME_BYTES_MAX = 16 << 20
NOTIFICATION_BYTES_MAX = 1 << 20


class Greeting(Wire, frozen=True, tag="greeting"):
    """The initiator's answer to the challenge: its identity, and proof that it has the metadata and the secret."""

    version: int
    nonce: bytes
    proof: bytes
    name: str
    host: bytes = b""


class Welcome(Wire, frozen=True, tag="welcome"):
    """The listening side's answer: its own proof and the id of the link for streams; or the error that refuses the initiator."""

    proof: bytes = b""
    link_id: int = 0
    error: ErrorInfo | None = None


class TransportMessage(Wire, frozen=True, tag="transport"):
    """A message from one side's transport to the other side's transport of the same name."""

    transport: str
    payload: bytes


class Notification(Wire, frozen=True, tag="notification"):
    """A notification from user to user."""

    payload: bytes


class Withdrawn(Wire, frozen=True, tag="withdrawn"):
    """A region of the sender is deregistered: forget it, and answer when nothing here uses it any more."""

    region_id: int


class WithdrawnDone(Wire, frozen=True, tag="withdrawn_done"):
    """The answer to `Withdrawn`."""

    region_id: int


LinkFrame = (
    Challenge
    | Greeting
    | Welcome
    | TransportMessage
    | Notification
    | Withdrawn
    | WithdrawnDone
    | Ping
    | Pong
    | Goodbye
)


def link_codec() -> FrameCodec[LinkFrame]:
    return FrameCodec(LinkFrame)


TRANSFER_VERSION = 1
"""Raised when an older agent could misread metadata or frames; neighbours understand each other."""
_MAGIC = b"PTA\n"
_BYTES_MAX = 64 << 20


class AgentMetadata(Wire, frozen=True):
    """An agent as its peers see it.

    `token` is random and proves that a peer was given this; `host` names the machine and its namespaces; `contacts` is what
    each transport adds; `certificate` is the fingerprint of the agent's TLS certificate.
    """

    version: int
    name: str
    token: bytes
    host: bytes
    addresses: tuple[str, ...] = ()
    contacts: dict[str, bytes] = msgspec.field(default_factory=dict)
    regions: tuple[RegionInfo, ...] = ()
    certificate: bytes = b""


_decoder = msgspec.msgpack.Decoder(AgentMetadata)


def encode_metadata(metadata: AgentMetadata) -> bytes:
    return _MAGIC + encode(metadata)


def decode_metadata(data: bytes) -> AgentMetadata:
    """Decode the result of `TransferAgent.metadata`.

    Raises:
        ProtocolError: it is no metadata, or of an unsupported version.
        TypeError: it is not bytes.
    """
    if not isinstance(data, bytes | bytearray):
        raise TypeError(
            f"agent metadata: {type(data).__name__}; expected the bytes that `metadata()` of the peer gave"
        )
    if not data.startswith(_MAGIC) or len(data) > _BYTES_MAX:
        raise ProtocolError(
            f"agent metadata: {len(data)} bytes that begin with {bytes(data[:4])!r}; expected what"
            " TransferAgent.metadata() of the peer returned, unchanged"
        )
    try:
        metadata = _decoder.decode(data[len(_MAGIC) :])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"agent metadata of {len(data)} bytes cannot be read: {error}") from error
    check_version(metadata.version, f"agent {metadata.name}")
    return metadata


def check_version(theirs: int, who: str) -> None:
    """Check a peer's version.

    Raises:
        ProtocolError: it is too far from ours.
    """
    framing.check_version(theirs, TRANSFER_VERSION, f"{who}: transfer version")


def host_fingerprint() -> bytes:
    """Name what processes must have in common to share memory: the boot, and the namespaces of network, pids and IPC."""
    digest = hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    for namespace in ("net", "pid", "ipc"):
        digest.update(str(Path(f"/proc/self/ns/{namespace}").readlink()).encode())
    return digest.digest()[:8]


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
