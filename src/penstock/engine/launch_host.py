"""What an engine takes from its host as it starts, and no graph says: free ports, private directories, what a read finds.

`ThisHost` takes it. `SymbolicHost` gives each such value a name instead, for `penstock graph render`.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from penstock.core.errors import ConfigError

_PARENT_BYTES_MAX = 60
"""A Unix socket's path has at most 107 bytes."""
_TRIES = 200
_PORTS = 1 << 16
_SIOCGIFADDR = 0x8915
_NO_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class LaunchHost(Protocol):
    """The host of an engine that starts."""

    variables: Mapping[str, str]
    """The environment before the engine's own variables."""

    def directory(self, prefix: str) -> str:
        """Make a private directory; its path is short enough for Unix sockets in it.

        Raises:
            ConfigError: it cannot be made.
        """
        ...

    def ports(
        self, what: str, count: int = 1, *, address: str = "", first: int | None = None
    ) -> Sequence[int | str]:
        """Find successive free TCP ports; the engine binds them a moment later.

        Args:
            what: their name where they are not looked for.
            count: how many.
            address: where they are bound; "" is every address of the host.
            first: the lowest port to try; None tries ephemeral ones.

        Raises:
            ConfigError: there are none, or `address` is none of this host.
        """
        ...

    def read(self, what: str, read: Callable[[], str]) -> str:
        """Give what `read` finds, or its name `what`."""
        ...

    def has_module(self, name: str) -> bool:
        """Say whether the engine's processes can import a module."""
        ...


class ThisHost:
    """Takes what an engine needs from the host of this process. One engine owns it; `close` removes its directories."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        """Make it; `variables` is the environment, None is this process's."""
        self.variables = os.environ if variables is None else variables
        self._directories: list[str] = []

    def directory(self, prefix: str) -> str:
        parent = Path(self.variables.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        if len(os.fsencode(parent)) > _PARENT_BYTES_MAX:
            parent = Path("/tmp")  # noqa: S108 - mkdtemp creates a private directory in it
        try:
            made = tempfile.mkdtemp(prefix=prefix, dir=parent)
        except OSError as error:
            raise ConfigError(
                f"{parent}: cannot make a private directory there: {(error.strerror or str(error)).lower()};"
                " set XDG_RUNTIME_DIR to a directory you can write"
            ) from error
        self._directories.append(made)
        return made

    def ports(
        self,
        what: str,
        count: int = 1,
        *,
        address: str = "",
        first: int | None = None,
    ) -> Sequence[int | str]:
        for attempt in range(_TRIES):
            port = _bind(address, 0) if first is None else first + attempt
            if port is not None and all(_bind(address, port + rank) is not None for rank in range(count)):
                return range(port, port + count)
        raise ConfigError(
            f"{what}: no {count} successive free TCP ports on {address or 'this host'} from {first or 'the ephemeral ones'} on;"
            " set another port, or end other programs of this host"
        )

    def read(self, what: str, read: Callable[[], str]) -> str:  # noqa: ARG002 - the name is for who does not read
        return read()

    def has_module(self, name: str) -> bool:
        return find_spec(name) is not None

    def close(self) -> None:
        """Remove the directories. Safe twice."""
        directories, self._directories = self._directories, []
        for each in directories:
            shutil.rmtree(each, ignore_errors=True)


class SymbolicHost:
    """Takes nothing: every value is its name, such as `<NIXL port>`."""

    def __init__(self) -> None:
        self.variables: Mapping[str, str] = {}

    def directory(self, prefix: str) -> str:
        return f"<directory {prefix}*>"

    def ports(
        self,
        what: str,
        count: int = 1,
        *,
        address: str = "",  # noqa: ARG002 - nothing is bound
        first: int | None = None,  # noqa: ARG002
    ) -> Sequence[int | str]:
        return [f"<{what}>" if rank == 0 else f"<{what} + {rank}>" for rank in range(count)]

    def read(self, what: str, read: Callable[[], str]) -> str:  # noqa: ARG002 - nothing is read
        return f"<{what}>"

    def has_module(self, name: str) -> bool:  # noqa: ARG002 - where the engine is, so are its packages
        return True


def own_address() -> str:
    """Find the address by which this host reaches others; the loopback address without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: nobody; UDP sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Name the network interface of this host that has an IPv4 address; empty for none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no IPv4 address
                if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return ""


def gloo_environment(host: LaunchHost, address: str) -> dict[str, str]:
    """Have gloo use the network interface with an address of this node: it would ask for the host's name, which may be of a loopback address."""
    name = host.read("network interface of the node's address", lambda: interface_of(address))
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def _bind(address: str, port: int) -> int | None:
    """Bind a port, 0 for any; give its number, None if it is taken or beyond the last one."""
    if port >= _PORTS:
        return None
    try:
        with socket.create_server((address, port)) as server:
            number: int = server.getsockname()[1]
            return number
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno in _NO_ADDRESS:
            raise ConfigError(f"{address} is no address of this machine; set one that it has") from error
        return None
