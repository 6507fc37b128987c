"""How many more workers a role may get on this machine, and why not more."""

import os
from collections.abc import Sequence

from penstock.core.types.instances import Role
from penstock.deploy.supervisor.resources.devices import Devices, devices_of
from penstock.deploy.supervisor.resources.ports import Ports
from penstock.deploy.supervisor.resources.process_cores import ProcessCores, computes_here
from penstock.deploy.supervisor.scaling.pool_worker import PoolWorker
from penstock.engine.registry import engine_kind
from penstock.graph import RoleSpec


class Room:
    """Bounds of one machine's pool."""

    def __init__(
        self, devices: Devices, cores: ProcessCores, workers_max: int, ports: Ports | None = None
    ) -> None:
        """Make the bounds.

        Args:
            devices: GPUs.
            cores: CPU cores of engines.
            workers_max: most workers that a router knows.
            ports: where workers listen; None for any free ports.
        """
        self.devices = devices
        self.cores = cores
        self.ports = Ports(None) if ports is None else ports
        self._workers_max = workers_max
        self._num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

    def give(self, worker: PoolWorker, spec: RoleSpec) -> None:
        """Give a worker its GPUs, its core and its ports.

        Raises:
            RequestError: they are not free (409).
        """
        worker.devices = self.devices.take(worker.name, devices_of(spec))
        worker.core = self.cores.take(worker.name, worker.home, spec)
        worker.ports = self.ports.take(worker.name)

    def release(self, worker: PoolWorker) -> None:
        """Free a worker's share, once its processes have ended."""
        for share in (self.devices, self.cores, self.ports):
            share.release(worker.name)

    def of(self, role: Role, spec: RoleSpec, workers: Sequence[PoolWorker]) -> tuple[int | None, str]:
        """Give (workers that may be added, what stops more); None without a known limit.

        Args:
            role: the role to grow.
            spec: its settings.
            workers: all workers of the pool; one that drains keeps its share of the machine until it has ended.
        """
        own = [worker for worker in workers if worker.home is role]
        bounds: list[tuple[int | None, str]] = [
            (
                self._workers_max - len(workers),
                f"a router knows at most {self._workers_max:,} workers (router.workers_max)",
            ),
            (
                self.devices.room(devices_of(spec)),
                f"each needs {self.devices.describe_lack(devices_of(spec))}",
            ),
            (self.cores.room(spec), f"each needs {self.cores.describe_lack()}"),
            self._declared(role, spec, len(own)),
        ]
        if (ports := self.ports.room()) is not None:
            bounds.append((ports, f"each needs {self.ports.describe_lack()}"))
        known = [(room, why) for room, why in bounds if room is not None]
        room, why = min(known, key=lambda bound: bound[0])
        return max(0, room), why

    def _declared(self, role: Role, spec: RoleSpec, count: int) -> tuple[int | None, str]:
        """Bound a role's own workers, of which there are `count`."""
        counter = engine_kind(spec.engine).count_workers
        if counter is not None and (most := counter(spec.engine_args)) is not None:
            return most - count, f"engine {spec.engine!r} has one worker for each url, {most}; add urls"
        if spec.nodes > 1:
            return 1 - count, (
                f"a worker has {spec.nodes} nodes and this host leads one; run penstock up --leader on another host"
            )
        if spec.replicas_max is not None:
            return (
                spec.replicas_max - count,
                f"roles.{role}.replicas_max is {spec.replicas_max}; raise it and start again",
            )
        if spec.kv.host:
            return spec.replicas - count, (
                f"kv.host is shared by the {spec.replicas} workers of the start; set roles.{role}.replicas_max and start again"
            )
        if computes_here(spec):
            most = max(spec.replicas, self._num_cpus)
            return most - count, (
                f"{most} workers compute on {self._num_cpus} cores; set roles.{role}.replicas_max for more, and start again"
            )
        return None, ""
