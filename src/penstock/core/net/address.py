"""Listening addresses: `tcp://127.0.0.1:5000`, `tcp://[::1]:5000` or `unix:///run/penstock/w0.sock`."""

import ipaddress
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from penstock.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Address:
    """TCP `host` and `port` (0: any free port), or the `path` of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str, *, source: str = "address") -> Self:
        """Parse an address.

        Raises:
            ConfigError: `text` is no address; `source` names the setting.
        """
        expected = "expected tcp://HOST:PORT or unix:///PATH"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{source}: {text!r}: {error}; {expected}") from error
        if parts.scheme == "unix" and parts.path.startswith("/") and not parts.netloc:
            return cls(path=parts.path)
        if parts.scheme == "tcp" and parts.hostname and port is not None and not parts.path:
            return cls(host=parts.hostname, port=port)
        raise ConfigError(f"{source}: {text!r} is no address; {expected}")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect: a Unix path, a loopback address or `localhost`."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a host name

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"
