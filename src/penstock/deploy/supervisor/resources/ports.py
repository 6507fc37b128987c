"""Gives each worker TCP ports of its own out of a range, so that firewalls can let them through."""

import re
from dataclasses import dataclass
from typing import Self

from penstock.core.errors import RequestError

PORTS_EACH = 2
"""Ports of a worker: one for requests, one for KV transfers."""


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports `first` to `last`, both included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `7500-7599`, as `runtime.ports` has checked it."""
        found = re.fullmatch(r"(\d+)-(\d+)", text)
        assert found is not None, "checked"
        return cls(int(found[1]), int(found[2]))

    def __len__(self) -> int:
        return self.last - self.first + 1


class Ports:
    """The ports that workers of this host may listen on. One event loop owns it."""

    def __init__(self, ports: PortRange | None) -> None:
        """Make an allocator; None: workers take any free port."""
        self._ports = ports
        self._taken: dict[str, tuple[int, ...]] = {}

    def take(self, name: str) -> tuple[int, ...]:
        """Give a worker the lowest free ports, for requests and for KV transfers; none without a range.

        Raises:
            RequestError: too few are free (409).
        """
        if self._ports is None:
            return ()
        taken = {port for ports in self._taken.values() for port in ports}
        free = [port for port in range(self._ports.first, self._ports.last + 1) if port not in taken]
        if len(free) < PORTS_EACH:
            raise RequestError(f"{name} needs {self.describe_lack()}", http_status=409)
        self._taken[name] = tuple(free[:PORTS_EACH])
        return self._taken[name]

    def release(self, name: str) -> None:
        """Free a worker's ports, once its processes have ended."""
        self._taken.pop(name, None)

    def room(self) -> int | None:
        """Count the workers that still find ports; None without a range."""
        return None if self._ports is None else len(self._ports) // PORTS_EACH - len(self._taken)

    def describe_lack(self) -> str:
        """Say how many ports there are, where too few are free."""
        assert self._ports is not None, "there is a range"
        return (
            f"{PORTS_EACH} ports, and runtime.ports {self._ports.first}-{self._ports.last} has {len(self._ports)} for"
            f" {len(self._taken)} workers already; widen it and start again"
        )
