"""The transports and the storage that an agent has."""

import os
from collections.abc import Iterable

from penstock.core.errors import ConfigError
from penstock.seams import Storage, Transport
from penstock.transfer.config import TransferConfig
from penstock.transfer.storage.file import FileStorage
from penstock.transfer.storage.object import ObjectStorage
from penstock.transfer.transports.memory import MemoryTransport
from penstock.transfer.transports.nixl.transport import NixlTransport
from penstock.transfer.transports.shm.transport import ShmTransport
from penstock.transfer.transports.tcp.transport import TcpTransport

NAMES = (
    MemoryTransport.name,
    ShmTransport.name,
    TcpTransport.name,
    NixlTransport.name,
    FileStorage.name,
    ObjectStorage.name,
)
"""All that are built in."""
BETWEEN_PROCESSES = (ShmTransport.name, TcpTransport.name, NixlTransport.name)
"""Those that reach the memory of another process."""

_SILENCE = 1.5
"""Of `heartbeat_timeout_s`: where the whole link is silent, that is the better word."""


def default_transports(config: TransferConfig) -> list[Transport | Storage]:
    """Make one of each transport and storage there is; those that cannot work here say so when they start."""
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
        FileStorage(threads=storage.io_threads),
        ObjectStorage(
            requests=storage.requests,
            request_timeout_s=storage.request_timeout_s,
            retries=storage.request_retries,
        ),
    ]


def allowed(
    made: Iterable[Transport | Storage], names: tuple[str, ...] | None
) -> tuple[dict[str, Transport], dict[str, Storage]]:
    """Keep what the configuration names; all for None.

    Returns:
        transports and storage, by name.

    Raises:
        ConfigError: it names one that there is not.
    """
    by_name = {one.name: one for one in made}
    unknown = [name for name in names or () if name not in by_name]
    if unknown:
        raise ConfigError(f"transports: {unknown[0]!r} is unknown; there are {', '.join(sorted(by_name))}")
    kept = {name: one for name, one in by_name.items() if names is None or name in names}
    return (
        {name: one for name, one in kept.items() if not isinstance(one, Storage)},
        {name: one for name, one in kept.items() if isinstance(one, Storage)},
    )
