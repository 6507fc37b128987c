"""The bounds and times of a transfer agent."""

from typing import Annotated

from pydantic import Field, SecretStr

from penstock.core.config import Config
from penstock.transfer.tcp_config import TcpConfig
from penstock.transfer.tls import TlsConfig

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
