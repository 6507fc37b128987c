"""How an engine is started: the same description starts it in a worker, and is printed by `penstock graph render`.

What only a start finds, such as free ports and private directories, comes from a `LaunchHost`: `ThisHost` takes it from the host,
and `SymbolicHost` gives each such value a name instead.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from penstock.core.errors import ConfigError
from penstock.engine.kv_events.subscriber import PublisherAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """What a worker calls to start its engine, with which arguments, in which environment.

    Attributes:
        call: the class, function or program that takes the arguments, as `vllm.AsyncEngineArgs`.
        version: the engine and version whose names these are; "" for Penstock's own.
        arguments: plain values by the engine's names; what is not here keeps the engine's default.
        environment: variables that are set for the engine's processes.
        kv_events: where the engine is told to publish its KV events; None: it publishes none.
    """

    call: str
    version: str = ""
    arguments: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    kv_events: PublisherAddress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePackage:
    """An engine's Python package.

    Attributes:
        engine: the engine's name in a graph.
        module: what is imported.
        install: command that installs it.
        versions: (lowest, first that is not supported), as (major, minor, patch); None: any.
        distributions: names under which an installer knows the package, any of them.
    """

    engine: str
    module: str
    install: str
    versions: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    distributions: tuple[str, ...] = ()

    @property
    def range(self) -> str:
        """The supported versions as a requirement, such as `>=2.13,<2.15`; empty for any."""
        if self.versions is None:
            return ""
        low, above = (".".join(map(str, each)) for each in self.versions)
        return f">={low},<{above}"

    @property
    def is_installed(self) -> bool:
        try:
            return find_spec(self.module) is not None
        except (ImportError, ValueError):
            return False

    def find_version(self) -> str:
        """Find the installed version without importing the package; "" if it is not installed, or says none."""
        if not self.is_installed:
            return ""
        for name in self.distributions or (self.module,):
            with contextlib.suppress(PackageNotFoundError):
                return version(name)
        return str(getattr(sys.modules.get(self.module), "__version__", ""))

    def supports(self, found: str) -> bool:
        """Say whether a version is in the supported range."""
        return self.versions is None or self.versions[0] <= numbers(found) < self.versions[1]

    def need(self) -> None:
        """Raise ConfigError where the package is not installed."""
        if not self.is_installed:
            raise ConfigError(
                f"engine {self.engine}: package {self.module} is not installed; run `{self.install}` in the environment of"
                " Penstock's workers"
            )


def numbers(text: str) -> tuple[int, ...]:
    """Read the leading numbers of a version: `0.5.23.post1` is (0, 5, 23), `1.2.0rc3` is (1, 2, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")[:3]) if match else ()


def expect_gpu(engine: str, device: str) -> None:
    """Raise ConfigError where the graph gives the worker a CPU."""
    if not device.startswith("cuda"):
        raise ConfigError(
            f"engine {engine}: runs on NVIDIA GPUs alone, the graph gives this worker hardware cpu; set hardware, as in"
            " `--set roles.aggregated.hardware=h100`"
        )


def refuse_own(engine: str, args: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Raise ConfigError where the graph's `engine_args` set an argument of Penstock's.

    Args:
        engine: the engine's name in a graph.
        args: the graph's `engine_args`.
        own: what to do instead, by the names of the arguments that Penstock sets.
    """
    for name in args:
        if name in own:
            raise ConfigError(f"engine_args.{name}: Penstock sets it for engine {engine}; {own[name]}")


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
    """Bind a port and give its number; 0 binds any free port. None where the port is taken or above 65535."""
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
