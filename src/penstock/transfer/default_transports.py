"""The transports that an agent has."""

import os
from collections.abc import Iterable

from penstock.core.errors import ConfigError
from penstock.seams import Transport
from penstock.transfer.config import TransferConfig
from penstock.transfer.storage.file import FileTransport
from penstock.transfer.storage.object import ObjectTransport
from penstock.transfer.transports.memory import MemoryTransport
from penstock.transfer.transports.nixl.transport import NixlTransport
from penstock.transfer.transports.shm.transport import ShmTransport
from penstock.transfer.transports.tcp.transport import TcpTransport

STORAGE = frozenset({FileTransport.name, ObjectTransport.name})
"""Those that an agent reaches its own storage by, and no other agent."""
NAMES = (
    MemoryTransport.name,
    ShmTransport.name,
    TcpTransport.name,
    NixlTransport.name,
    *sorted(STORAGE),
)
"""All that are built in."""
BETWEEN_PROCESSES = (ShmTransport.name, TcpTransport.name, NixlTransport.name)
"""Those that reach the memory of another process."""

_SILENCE = 1.5
"""Of `heartbeat_timeout_s`: where the whole link is silent, that is the better word."""


def default_transports(config: TransferConfig) -> list[Transport]:
    """Make one of each transport there is; those that cannot work here say so when they start."""
    copies, storage = config.copies, config.storage
    copying = min(copies.threads, max(1, len(os.sched_getaffinity(0)) // 2))
    return [
        MemoryTransport(threads=copying, inline_bytes_max=copies.inline_bytes_max),
        ShmTransport(threads=copying, inline_bytes_max=copies.inline_bytes_max),
        TcpTransport(
            config.tcp,
            inline_bytes_max=copies.inline_bytes_max,
            idle_s=_SILENCE * config.heartbeat_timeout_s,
        ),
        NixlTransport(),
        FileTransport(threads=storage.io_threads, io_bytes=storage.io_bytes),
        ObjectTransport(
            requests=storage.requests,
            request_timeout_s=storage.request_timeout_s,
            retries=storage.request_retries,
        ),
    ]


def allowed(made: Iterable[Transport], names: tuple[str, ...] | None) -> dict[str, Transport]:
    """Keep the transports that the configuration names, by name; all for None.

    Raises:
        ConfigError: it names one that there is not.
    """
    by_name = {transport.name: transport for transport in made}
    if names is None:
        return by_name
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ConfigError(f"transports: {unknown[0]!r} is unknown; there are {', '.join(sorted(by_name))}")
    return {name: transport for name, transport in by_name.items() if name in names}
