"""The bounds and times of a transfer agent."""

import hashlib
import socket
import ssl
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, SecretStr

from penstock.core.config import Config
from penstock.core.errors import ConfigError, ProtocolError


class TlsConfig(Config):
    """Certificates for links and streams over `tcp://`; an agent that has them speaks TLS there and nothing else."""

    certificate: str
    """PEM file with this agent's certificate, and those between it and the authority."""
    key: str
    """PEM file with its private key, not encrypted."""
    authority: str
    """PEM file with the certificates that sign those of peers; it should sign no others, as whoever has one may connect."""


class TlsIdentity:
    """An agent's certificate, and the certificates that it accepts."""

    def __init__(self, config: TlsConfig) -> None:
        """Read the files.

        Raises:
            ConfigError: a file cannot be read, or certificate and key do not belong together.
        """
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, config)
        self.server.num_tickets = 0  # nobody resumes
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, config)
        text = Path(config.certificate).read_text(encoding="ascii", errors="replace")
        first = text[text.index(_BEGIN) : text.index(_END) + len(_END)]
        self.fingerprint = fingerprint_of(ssl.PEM_cert_to_DER_cert(first))
        """The fingerprint of the certificate, for this agent's metadata."""

    @classmethod
    def of(cls, config: TlsConfig | None) -> Self | None:
        return None if config is None else cls(config)

    def check_peer(self, certificate: bytes | None, fingerprint: bytes) -> None:
        """Check that a listener has the certificate that its metadata names.

        Raises:
            ProtocolError: it has another one.
        """
        if certificate is None or fingerprint_of(certificate) != fingerprint:
            raise ProtocolError(
                "the listener's certificate is another one than its metadata names: exchange metadata anew, or somebody"
                " listens in its place"
            )

    def wrap(self, connection: socket.socket, *, server_side: bool) -> ssl.SSLSocket:
        """Wrap a connected socket; the caller runs the TLS handshake."""
        context = self.server if server_side else self.client
        return context.wrap_socket(connection, server_side=server_side, do_handshake_on_connect=False)


def fingerprint_of(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def _context(protocol: int, config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # agents move between hosts: metadata names the certificate itself
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(config.certificate, config.key, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls: certificate {config.certificate}, key {config.key}: {error}; both must be PEM files that belong together"
        ) from error
    try:
        context.load_verify_locations(config.authority)
    except OSError as error:
        raise ConfigError(f"tls.authority: {config.authority}: {error}; expected a PEM file") from error
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; decrypt it, and protect the file")


class TcpConfig(Config):
    """What peers may have under way here at once by TCP, and how bytes are cut."""

    streams: int = Field(default=2, ge=1)
    """Streams to one peer that share one large transfer of this agent."""
    streams_per_peer_max: int = Field(default=16, ge=1)
    """Streams that one peer may open, each with a thread while bytes move; what it asks for beyond waits there."""
    streams_max: int = Field(default=256, ge=1)
    """Streams to and from all peers together; more are refused."""
    window: int = Field(default=64, ge=1, le=128)
    """Small transfers to one peer under way at once; the others wait their turn."""
    piece_bytes_max: int = Field(default=64 << 20, ge=1 << 20)
    """The most that one stream moves before another transfer has its turn, and so the most under way on each."""


IN_PROCESS = "memory"
SAME_HOST = "unix"

ListenAddress = Annotated[str, Field(pattern=r"^(memory|unix|tcp://.+:\d+)$")]


class StorageConfig(Config):
    """How files and object stores are read and written."""

    io_threads: int = Field(default=8, ge=1, le=64)
    """Reads and writes of one file under way at once: the depth of the disk's queue."""
    requests: int = Field(default=8, ge=1)
    """Objects that are got or put at once; each takes up to three times its size in memory."""
    request_timeout_s: float = Field(default=10.0, gt=0)
    """How long one request to an object store may take, with its retries."""
    request_retries: int = Field(default=3, ge=0)
    """How often a request is tried again, after an error 5xx or a lost connection."""


class CopyConfig(Config):
    """How memory is copied."""

    inline_bytes_max: int = Field(default=64 << 10, ge=0)
    """Up to this many bytes are copied at once, within `post`, and go over TCP in one message; more than that by threads."""
    threads: int = Field(default=2, ge=1)
    """Native threads that share one large copy, but at most half of the cores."""


class TransferConfig(Config):
    """What an agent may use, and how long it waits."""

    listen: tuple[ListenAddress, ...] = (IN_PROCESS, SAME_HOST)
    """Where peers reach it: `memory` in the same process, `unix` on the same host, `tcp://HOST:PORT` from anywhere."""
    advertise: str | None = None
    """Host name or address by which peers reach the `tcp://` addresses of `listen`; null is that of the address, or of this host."""
    secret: SecretStr = SecretStr("")
    """Shared by the agents of a deployment, beside what each one's metadata carries; never sent."""
    transports: tuple[str, ...] | None = None
    """The only ones to use; null for all that work here."""
    timeout_s: float = Field(default=30.0, gt=0)
    """A transfer's deadline where the caller gives none."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    """How long connecting to a peer may take."""
    heartbeat_timeout_s: float = Field(default=2.0, gt=0)
    """A peer silent for so long is lost."""
    transfers_max: int = Field(default=1024, ge=1)
    """Transfers under way at once; more are refused."""
    notifications_max: int = Field(default=65_536, ge=1)
    """Notifications kept for a reader; a peer that sends more is disconnected, with an error on both sides."""
    tls: TlsConfig | None = None
    """Certificates for `tcp://` addresses; null for no TLS."""
    copies: CopyConfig = CopyConfig()
    """What is copied at once, and what by threads."""
    tcp: TcpConfig = TcpConfig()
    """Bounds of transport `tcp`."""
    storage: StorageConfig = StorageConfig()
    """Files and object stores."""
