"""Opening and connecting sockets by `Address`, TCP and Unix alike."""

import asyncio
import contextlib
import errno
import socket
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from penstock.core.address import Address
from penstock.core.errors import ConfigError

P = TypeVar("P", bound=asyncio.BaseProtocol)
_BACKLOG = 1024  # a whole fleet reconnects at once after a restart


async def listen(
    factory: Callable[[], asyncio.BaseProtocol], address: Address
) -> tuple[asyncio.Server, Address]:
    """Open a listening socket; a Unix one is for this user only.

    Returns:
        the server, and the address with its real port.

    Raises:
        ConfigError: the address is in use, not allowed or not of this host.
    """
    loop = asyncio.get_running_loop()
    try:
        if address.path:
            _claim(address)
            server = await loop.create_unix_server(factory, address.path, backlog=_BACKLOG)
            _protect(address)
            return server, address
        server = await loop.create_server(factory, address.host, address.port, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"{address}: cannot listen: {error.strerror or error}; choose another address, or port 0 for any free one"
        ) from error
    return server, replace(address, port=server.sockets[0].getsockname()[1])


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
