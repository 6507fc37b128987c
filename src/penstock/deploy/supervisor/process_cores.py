"""Which CPU cores the processes of a deployment run on, where its workers have cores of their own.

A step of a decode worker makes every stream wait, while a prompt or a frontend's answer only takes a little longer. Left to
the system, a frontend that hears from a decode worker runs on that worker's core, next to its next step. On two cores that
made the slowest hundredth of steps 10 to 20 % longer (seven plays in which it changed every second).
"""

import os
from collections.abc import Collection, Mapping

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.graph import RoleSpec

_COMPUTING = "paged"


class ProcessCores:
    """Gives each worker that computes on a CPU a core, and keeps all others off those that decode."""

    def __init__(self, roles: Mapping[Role, RoleSpec], usable: Collection[int] | None) -> None:
        """Give the first core to the first worker.

        Args:
            roles: those with workers here.
            usable: the cores that this process may use, as the system numbers them; None keeps nobody anywhere.

        Raises:
            ConfigError: there are fewer than workers that want one.
        """
        self._engines: dict[tuple[Role, int], int] = {}
        self._free: frozenset[int] = frozenset()  # of no decode worker; if empty, all run anywhere
        if usable is None:
            return
        workers = [
            (name, index)
            for name, role in roles.items()
            if role.engine == _COMPUTING and role.hardware == "cpu"
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
        """Give the core of a role's worker number `index`; None where it has none of its own."""
        return self._engines.get((role, index))

    def of_process(self, role: Role | None = None, index: int = 0) -> tuple[int, ...]:
        """Give the cores that a worker's process may use, or a frontend's without a role; none named is all of them."""
        if not self._free:
            return ()
        own = self.of_engine(role, index) if role is not None else None
        return tuple(sorted(self._free if own is None else self._free | {own}))


def usable_cores() -> Collection[int]:
    """Give the cores that this process may use, as the system numbers them.

    Raises:
        ConfigError: this system does not say.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("worker.own_cores: this system keeps no thread to a core; leave it out")
    return os.sched_getaffinity(0)
