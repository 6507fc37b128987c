"""Assigns CPU cores to processes, where workers have their own (`worker.own_cores`).

A slow step of a decode worker delays every stream; a slow prompt or frontend delays one request. The kernel runs a
frontend on the core of the decode worker it hears from, beside that worker's next step. On two cores this made the
slowest 1 % of steps 10 to 20 % longer (seven runs that switched it every second).
"""

import os
from collections.abc import Collection, Mapping

from penstock.core.errors import ConfigError, RequestError
from penstock.core.types.instances import Role
from penstock.engine.registry import engine_kind
from penstock.graph import RoleSpec


class ProcessCores:
    """Gives each CPU worker a core, and keeps processes that start later off the cores of decode workers.

    One event loop owns it.
    """

    def __init__(self, usable: Collection[int] | None) -> None:
        """Make an allocator of the cores with these indices; None assigns no cores."""
        self._usable = None if usable is None else frozenset(usable)
        self._engines: dict[str, int] = {}
        self._decoding: set[str] = set()

    def take(self, name: str, role: Role, spec: RoleSpec) -> int | None:
        """Give a worker the lowest free core; None if it needs none of its own.

        Raises:
            RequestError: all are taken (409).
        """
        if self._usable is None or not computes_here(spec):
            return None
        free = self._usable - set(self._engines.values())
        if not free:
            raise RequestError(f"{name} needs {self.describe_lack()}", http_status=409)
        self._engines[name] = min(free)
        if role is Role.DECODE:
            self._decoding.add(name)
        return min(free)

    def release(self, name: str) -> None:
        """Free a worker's core, once its processes have ended."""
        self._engines.pop(name, None)
        self._decoding.discard(name)

    def room(self, spec: RoleSpec) -> int | None:
        """Count the workers that still find a core; None where workers have no cores of their own."""
        if self._usable is None or not computes_here(spec):
            return None
        return len(self._usable) - len(self._engines)

    def describe_lack(self) -> str:
        """Say which worker has which core, where none is free."""
        held = ", ".join(f"{core} by {name}" for name, core in sorted(self._engines.items()))
        return f"a core of its own (worker.own_cores); taken: {held}; retire a worker first"

    def of_engine(self, name: str) -> int | None:
        """Give a worker's core; None if it has none."""
        return self._engines.get(name)

    def of_process(self, name: str = "") -> tuple[int, ...]:
        """Give the cores of a process that starts now: a worker's or, without a name, a frontend's; empty is all."""
        if self._usable is None:
            return ()
        free = self._usable - {self._engines[each] for each in self._decoding}
        if not free:
            return ()
        own = self.of_engine(name)
        return tuple(sorted(free if own is None else free | {own}))


def computes_here(spec: RoleSpec) -> bool:
    """Tell whether a role's engine computes on this machine's CPU."""
    return spec.hardware == "cpu" and engine_kind(spec.engine).has_weights


def expect_cores(roles: Mapping[Role, RoleSpec], usable: Collection[int]) -> None:
    """Check that the graph's workers find a core each.

    Raises:
        ConfigError: there are fewer usable cores than CPU workers.
    """
    workers = sum(role.replicas for role in roles.values() if computes_here(role))
    if workers > len(usable):
        raise ConfigError(
            f"worker.own_cores: {workers} workers compute on CPU cores, got {len(usable)} that this process may use;"
            " run fewer workers here, or leave it out"
        )


def usable_cores() -> Collection[int]:
    """Give the indices of the cores that this process may use.

    Raises:
        ConfigError: the system does not support CPU affinity.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("worker.own_cores: this system keeps no thread to a core; leave it out")
    return os.sched_getaffinity(0)
