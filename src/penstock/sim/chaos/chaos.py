"""Faults by plan or by seed: kind, target, time and duration."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.sim.world.cluster import SimCluster, SimWorker
from penstock.sim.world.network import REGISTRY


class FaultKind(StrEnum):
    KILL = "kill"  # the process is killed and replaced
    DRAIN = "drain"  # the worker drains and is replaced
    PAUSE = "pause"  # the process is stopped, then continues
    SLOW = "slow"  # its engine steps take longer
    PARTITION = "partition"  # no network between the worker and one frontend
    ISOLATE = "isolate"  # no network between the worker and the registry
    RESET = "reset"  # connections to one frontend are reset
    LEASE_LOSS = "lease_loss"  # the registry drops the worker, which registers again


SLOW_FACTOR = 5.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `worker` and `frontend` are positions among those that run at that moment."""

    at_s: float
    kind: FaultKind
    worker: int = 0
    frontend: int = 0
    duration_s: float = 0.0


def random_faults(
    rng: random.Random, *, count: int, duration_s: float, longest_s: float = 3.0
) -> list[Fault]:
    """Draw `count` random faults within `duration_s`, most of them short."""
    return sorted(
        (
            Fault(
                at_s=rng.uniform(0.0, duration_s),
                kind=rng.choice(tuple(FaultKind)),
                worker=rng.randrange(1 << 16),
                frontend=rng.randrange(1 << 16),
                duration_s=min(rng.expovariate(4.0 / longest_s), longest_s),
            )
            for _ in range(count)
        ),
        key=lambda fault: fault.at_s,
    )


class Chaos:
    """Injects faults into a cluster. Faults that end a worker leave at least `spare` workers."""

    def __init__(self, cluster: SimCluster, *, spare: int = 2) -> None:
        self.cluster = cluster
        self.done: list[Fault] = []
        """Faults injected; a fault without a target is skipped."""
        self._spare = spare
        self._names = 0
        self._group = asyncio.TaskGroup()

    async def run(self, faults: Sequence[Fault]) -> None:
        """Inject all faults; returns once every fault is over and every ended worker replaced."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        async with self._group:
            for fault in faults:
                await asyncio.sleep(start_s + fault.at_s - loop.time())
                self._happen(fault)

    def _happen(self, fault: Fault) -> None:
        living = [worker for worker in self.cluster.workers.values() if not worker.is_draining]
        ends = fault.kind in {FaultKind.KILL, FaultKind.DRAIN}
        if len(living) <= (self._spare if ends else 0):
            return
        worker = living[fault.worker % len(living)]
        hosts = self.cluster.frontend_hosts
        frontend = hosts[fault.frontend % len(hosts)]
        self.done.append(fault)
        self.cluster.settle(worker.name)
        match fault.kind:
            case FaultKind.KILL:
                self.cluster.kill(worker.name)
            case FaultKind.DRAIN:
                self.cluster.drain(worker.name)
            case FaultKind.RESET:
                self.cluster.plane.break_links(worker.host, frontend)
            case FaultKind.LEASE_LOSS:
                self.cluster.registry.lose_lease(worker.host)
            case _:
                self._group.create_task(self._last(fault, worker, frontend), name=f"fault {fault.kind}")
        if ends:
            self._names += 1
            self._group.create_task(
                self.cluster.start(f"replacement-{self._names}", worker.role), name="replacement"
            )

    async def _last(self, fault: Fault, worker: SimWorker, frontend: str) -> None:
        network = self.cluster.network
        match fault.kind:
            case FaultKind.PAUSE:
                worker.pace.stop()
                network.freeze(worker.host)
                await asyncio.sleep(fault.duration_s)
                network.thaw(worker.host)
                worker.pace.go_on()
            case FaultKind.SLOW:
                worker.pace.factor *= SLOW_FACTOR
                await asyncio.sleep(fault.duration_s)
                worker.pace.factor /= SLOW_FACTOR
            case _:
                other = frontend if fault.kind is FaultKind.PARTITION else REGISTRY
                network.cut(worker.host, other)
                await asyncio.sleep(fault.duration_s)
                network.mend(worker.host, other)
