"""Assigns CPU cores to processes, where workers have their own (`worker.own_cores`).

A slow step of a decode worker delays every stream; a slow prompt or frontend delays one request. The kernel runs a
frontend on the core of the decode worker it hears from, beside that worker's next step. On two cores this made the
slowest 1 % of steps 10 to 20 % longer (seven runs that switched it every second).
"""

import os
from collections.abc import Collection, Mapping

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.engine.registry import engine_kind
from penstock.graph import RoleSpec


class ProcessCores:
    """Gives each CPU worker a core, and keeps other processes off the cores of decode workers."""

    def __init__(self, roles: Mapping[Role, RoleSpec], usable: Collection[int] | None) -> None:
        """Assign cores in the order of the workers.

        Args:
            roles: roles with workers on this machine.
            usable: indices of the usable cores; None assigns no cores.

        Raises:
            ConfigError: fewer usable cores than CPU workers.
        """
        self._engines: dict[tuple[Role, int], int] = {}
        self._free: frozenset[int] = frozenset()  # cores of no decode worker; empty: no restriction
        if usable is None:
            return
        workers = [
            (name, index)
            for name, role in roles.items()
            if role.hardware == "cpu" and engine_kind(role.engine).has_weights
            for index in range(role.replicas)
        ]
        if len(workers) > len(usable):
            raise ConfigError(
                f"worker.own_cores: {len(workers)} workers compute on CPU cores, got {len(usable)} that this process may use;"
                " run fewer workers here, or leave it out"
            )
        self._engines = dict(zip(workers, sorted(usable), strict=False))
        decoding = {core for (role, _), core in self._engines.items() if role is Role.DECODE}
        self._free = frozenset(usable) - decoding

    def of_engine(self, role: Role, index: int) -> int | None:
        """Give the core of a role's worker `index`; None if it has none."""
        return self._engines.get((role, index))

    def of_process(self, role: Role | None = None, index: int = 0) -> tuple[int, ...]:
        """Give the cores of a worker's process, or with role None of a frontend's; empty is all."""
        if not self._free:
            return ()
        own = self.of_engine(role, index) if role is not None else None
        return tuple(sorted(self._free if own is None else self._free | {own}))


def usable_cores() -> Collection[int]:
    """Give the indices of the cores that this process may use.

    Raises:
        ConfigError: the system does not support CPU affinity.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("worker.own_cores: this system keeps no thread to a core; leave it out")
    return os.sched_getaffinity(0)
