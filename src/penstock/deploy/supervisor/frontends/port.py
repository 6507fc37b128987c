"""One TCP port, reserved by the supervisor and shared by its frontend processes (SO_REUSEPORT)."""

import errno
import ipaddress
import socket
from collections.abc import Iterator
from typing import Self

from penstock.core.errors import ConfigError


class Port:
    """A port reserved for the deployment: bound, never listened on.

    Connections go to the frontends, which bind it too; number 0 picks a free port.
    """

    def __init__(self, host: str, number: int) -> None:
        """Bind the port.

        Raises:
            ConfigError: the port is in use, or the address is not this machine's.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            # First without SO_REUSEPORT: with it, another program on the port would go unnoticed.
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind(address)
        except OSError as error:
            raise ConfigError(_explain(host, number, error)) from error
        self.host: str = self._socket.getsockname()[0]
        self.number: int = self._socket.getsockname()[1]

    def url(self, scheme: str = "http") -> str:
        """Give the URL for clients on this machine."""
        address = ipaddress.ip_address(self.host.partition("%")[0])
        if address.is_unspecified:
            address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
        host = f"[{address}]" if address.version == 6 else str(address)
        return f"{scheme}://{host}:{self.number}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _explain(host: str, number: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"frontend.host: {host}: {error.strerror or 'unknown host'}; use an address of this machine, such as 127.0.0.1"
    if error.errno == errno.EADDRINUSE:
        return f"frontend.port: {number} on {host} is in use; stop what listens there, or choose another with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"frontend.host: {host} is not an address of this machine; use 127.0.0.1, or 0.0.0.0 for all"
    if error.errno == errno.EACCES:
        return f"frontend.port: {number} needs root; choose one above 1023 with --port"
    return f"frontend: cannot bind {host} port {number}: {(error.strerror or str(error)).lower()}"


def say_open(port: Port, *, is_open: bool) -> Iterator[str]:
    """Yield a warning if the API is open to other machines without a key."""
    if is_open and not port.is_loopback:
        yield (
            f"{port.host} port {port.number} answers whoever reaches it: no API key is set;"
            " give --api-key-file or PENSTOCK_API_KEY"
        )
