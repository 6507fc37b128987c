"""What workers take of a host: GPUs, ports, cores and shared memory."""

import mmap
import os
import re
import secrets
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from penstock.core.cuda import visible_gpus
from penstock.core.errors import ConfigError, RequestError, TransferError
from penstock.core.types.instances import Role
from penstock.engine.registry import engine_kind
from penstock.graph import RoleSpec
from penstock.kv.host_arena import HostPart
from penstock.perf.hardware import find_hardware
from penstock.transfer.regions.arena import Arena


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
        """Raise AssertionError if a worker has a GPU that the machine does not have."""
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


_RECORDS_FACTOR = 4
"""An extent has so many times the bytes of its blocks: records take at most three times the bytes of the smallest blocks."""
_RECORDS_BYTES = 1 << 20


class HostExtents:
    """Where each worker's extent lies in the arena. Takes no memory.

    Attributes:
        num_bytes: of the arena; 0 if no role has a host tier.
    """

    def __init__(self, roles: Mapping[Role, RoleSpec]) -> None:
        """Lay out the extents of all workers that the roles may get."""
        self._numbers: dict[tuple[Role, int], int] = {}
        self._sharing: dict[Role, int] = {}
        self.num_bytes = 0
        extents: list[tuple[int, int]] = []
        for name, role in roles.items():
            if role.kv.host and role.replicas_most:
                self._sharing[name] = role.replicas_most
                size = _extent_bytes(role)
                for index in range(role.replicas_most):
                    self._numbers[name, index] = len(extents)
                    extents.append((self.num_bytes, size))
                    self.num_bytes += size
        self._extents = tuple(extents)

    def part(self, role: Role, index: int, path: str) -> HostPart | None:
        """Return what a worker is told of the arena at `path`; None if its role has no host tier."""
        number = self._numbers.get((role, index))
        if number is None:
            return None
        return HostPart(path=path, number=number, extents=self._extents, sharing=self._sharing[role])


class HostArena:
    """One sealed arena with an extent for each worker of this host. Each worker allocates the pages of its own extent; the supervisor keeps the arena open.

    An extent belongs to a role and number, so that a restarted worker finds its blocks again. Workers that scaling may add
    later (`replicas_max`) have theirs from the start.
    """

    def __init__(self, roles: Mapping[Role, RoleSpec]) -> None:
        """Create it, if a role has a host tier.

        Args:
            roles: the roles that run on this host.

        Raises:
            ConfigError: the host refuses so much address space.
        """
        self._extents = HostExtents(roles)
        self._arena: Arena | None = None
        self._name = secrets.token_hex(8)
        if self._extents.num_bytes:
            try:
                self._arena = Arena.create(self._extents.num_bytes, prefault=False)
            except TransferError as error:
                raise ConfigError(f"kv.host: {error.message}") from error

    def part(self, role: Role, index: int) -> HostPart | None:
        """Return what a worker is told of it; None if its role has no host tier."""
        if self._arena is None:
            return None
        part = self._extents.part(role, index, f"/proc/{os.getpid()}/fd/{self._arena.fd}")
        return None if part is None else replace(part, arena=self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._arena is not None:
            self._arena.close()


def _extent_bytes(role: RoleSpec) -> int:
    """Size a worker's extent: as all of the host's memory where the tier is a multiple of blocks, whose bytes only workers know."""
    size = role.kv.host
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    share = memory if size.is_multiple else size.shared_by(role.replicas_most).num_bytes * _RECORDS_FACTOR
    return -(-(share + _RECORDS_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


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
