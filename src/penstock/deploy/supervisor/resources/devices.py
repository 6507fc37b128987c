"""Gives each GPU worker GPUs of its own."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from penstock.core.cuda import visible_gpus
from penstock.core.errors import ConfigError, RequestError
from penstock.core.types.instances import Role
from penstock.engine.registry import engine_kind
from penstock.graph import RoleSpec
from penstock.perf.model.hardware import find_hardware


class Devices:
    """The GPUs that this process may use, by index. One event loop owns it."""

    def __init__(self, count: int | None) -> None:
        """Make an allocator.

        Args:
            count: GPUs of this machine; None where it is unknown: then no number is too large.
        """
        self._count = count
        self._owners: dict[int, str] = {}

    def take(self, owner: str, count: int) -> tuple[int, ...]:
        """Give a worker `count` GPUs with consecutive indices, the lowest that are free; none for 0.

        Raises:
            RequestError: so many in a row are not free (409).
        """
        if count == 0:
            return ()
        first = self._first_free(count)
        if first is None:
            raise RequestError(f"{owner} needs {self.describe_lack(count)}", http_status=409)
        taken = tuple(range(first, first + count))
        self._owners.update(dict.fromkeys(taken, owner))
        return taken

    def release(self, owner: str) -> None:
        """Free a worker's GPUs, once its processes have ended."""
        self._owners = {device: name for device, name in self._owners.items() if name != owner}

    def room(self, count: int) -> int | None:
        """Count the workers with `count` GPUs each that still find room; None is no known limit."""
        if count == 0 or self._count is None:
            return None
        rooms, run = 0, 0
        for device in range(self._count):
            run = 0 if device in self._owners else run + 1
            if run == count:
                rooms, run = rooms + 1, 0
        return rooms

    def describe_lack(self, count: int) -> str:
        """Say which worker has which GPU, where `count` in a row are not free."""
        held = ", ".join(f"{device} by {name}" for device, name in sorted(self._owners.items()))
        wanted = "a free GPU" if count == 1 else f"{count} free GPUs in a row"
        return f"{wanted} of this machine's {self._count}; taken: {held or 'none'}; retire a worker first"

    def check(self) -> None:
        """Raise AssertionError if a GPU is given that the machine has not."""
        assert self._count is None or all(0 <= device < self._count for device in self._owners)
        assert all(count > 0 for count in Counter(self._owners.values()).values())

    def _first_free(self, count: int) -> int | None:
        end = max(self._owners, default=-1) + 1 + count if self._count is None else self._count
        for first in range(end - count + 1):
            if not any(device in self._owners for device in range(first, first + count)):
                return first
        return None


def devices_of(spec: RoleSpec) -> int:
    """Count the GPUs of one worker on each of its nodes; 0 for mock engines, servers elsewhere and workers on CPUs."""
    return 0 if spec.hardware == "cpu" or not engine_kind(spec.engine).has_weights else spec.devices_per_node


def expect_one_machine(roles: Mapping[Role, RoleSpec]) -> None:
    """Check that a machine of the graph's hardware has the GPUs of all workers, which get them in the order of the roles.

    Says nothing of hardware whose machines differ in their number of GPUs.

    Raises:
        ConfigError: the first worker for which none are left.
    """
    used = 0
    for name, role in roles.items():
        count, most = devices_of(role), find_hardware(role.hardware).host_devices
        workers = role.replicas if count else 0
        if most is not None and used + workers * count > most:
            index = max(most - used, 0) // count
            first = used + index * count
            gpus = f"GPU {first}" if count == 1 else f"GPUs {first} to {first + count - 1}"
            raise ConfigError(
                f"roles.{name}: worker {index + 1} of {role.replicas} would get {gpus}, but a machine with"
                f" {role.hardware} has {most}, 0 to {most - 1}; penstock serve starts workers on one machine: start"
                " workers that span machines as servers of their own (docs/recipes.md), or lower replicas or the parallelism"
            )
        used += workers * count


def count_devices(root: Path = Path("/")) -> int | None:
    """Count the GPUs that CUDA_VISIBLE_DEVICES lists, else NVIDIA's device files; None where neither says.

    A container has device files of its own GPUs alone. `root` is where `dev` is.
    """
    if (names := visible_gpus(os.environ)) is not None:
        return len(names)
    return len(list(root.glob("dev/nvidia[0-9]*"))) or None
