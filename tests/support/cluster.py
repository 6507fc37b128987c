"""A whole deployment on one event loop: real workers and dispatchers over memory planes, with fault injection."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from prometheus_client import CollectorRegistry

from penstock.core.errors import PenstockError
from penstock.core.ids import WorkerId
from penstock.core.types.instances import Instance, InstanceChange, ModelCard, Prices, Role
from penstock.router.config import RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.runtime.config import PlaneConfig
from penstock.runtime.discovery.view import MemoryDiscovery, MemoryRegistration
from penstock.runtime.requests.memory import MemoryPlane
from penstock.seams import Engine
from penstock.transfer import TransferAgent, TransferConfig
from penstock.transfer.transports.memory import MemoryTransport
from penstock.worker.config import WorkerConfig
from penstock.worker.registration import WorkerIdentity
from penstock.worker.worker import Worker


def small_card(name: str = "tiny", block_size: int = 4) -> ModelCard:
    """Make a model card without files."""
    return ModelCard(name=name, context_length=400, block_size=block_size, salt=b"tiny-1")


@dataclass(slots=True)
class _Member:
    worker: Worker
    engine: Engine
    discovery: "_MortalDiscovery"
    task: asyncio.Task[None]


class MemoryCluster:
    """Workers by name. Enter it; leaving it stops the remaining workers at once."""

    def __init__(self, seed: int = 0, *, lease_ttl_s: float = 5.0, plane: PlaneConfig | None = None) -> None:
        self.rng = random.Random(seed)
        self.discovery = MemoryDiscovery(lease_ttl_s=lease_ttl_s)
        self.plane = MemoryPlane(plane)
        self.errors: dict[str, PenstockError] = {}
        """Errors of workers that ended with one."""
        self.registry = CollectorRegistry()
        """Of the dispatcher that was made last, for its metrics."""
        self._members: dict[str, _Member] = {}
        self._registries: list[CollectorRegistry] = []
        self._numbers = 0
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self._members.values():
            member.task.cancel()
        await self._group.__aexit__(None, None, None)
        await self.discovery.close()

    async def start(
        self,
        name: str,
        engine: Engine,
        *,
        card: ModelCard | None = None,
        config: WorkerConfig | None = None,
        files: dict[str, bytes] | None = None,
        adapters: Sequence[str] = (),
        prices: Prices | None = None,
        role: Role = Role.AGGREGATED,
        transport: MemoryTransport | None = None,
        agent: TransferAgent | None = None,
    ) -> Worker:
        """Run a worker; return once it is registered or has failed.

        With a `transport`, or a role that needs one, it transfers KV within this loop; with an `agent`, through that agent.
        """
        self._numbers += 1
        discovery = _MortalDiscovery(self.discovery)
        worker = Worker(
            engine,
            discovery,
            self.plane,
            identity=WorkerIdentity(WorkerId(self._numbers), name, role),
            card=card or small_card(),
            read_file=(files or {}).get,
            prices=prices,
            adapters=adapters,
            config=config,
            agent=agent
            if agent is not None or (role is Role.AGGREGATED and transport is None)
            else _agent(f"{name}-{self._numbers}", transport or memory_transport()),
        )
        task = self._group.create_task(self._run(name, worker), name=name)
        self._members[name] = _Member(worker, engine, discovery, task)
        ready = self._group.create_task(worker.ready.wait())
        await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        return worker

    def kill(self, name: str) -> None:
        """Imitate a killed worker process: connections break and its lease expires, without a goodbye."""
        member = self._members.pop(name)
        member.discovery.abandon()
        assert member.worker.instance is not None, f"{name} has not been ready"
        self.plane.kill(member.worker.instance.address)
        member.task.cancel()

    def cut(self, name: str) -> None:
        """Break the connections to a worker; both ends live on."""
        for link in self.links(name):
            link.break_off("the cable was pulled", tell_service=True)

    def links(self, name: str) -> Sequence[Any]:
        """Give the worker's ends of the connections to it."""
        instance = self.worker(name).instance
        assert instance is not None, f"{name} has not been ready"
        server = self.plane._servers.get(instance.address)  # None once the worker has left
        return () if server is None else tuple(server.links)

    def abandon(self, name: str) -> None:
        """Have the lease of a worker run out that goes on living."""
        self._members[name].discovery.abandon()

    def figure(self, name: str, **labels: str) -> float:
        """Add up a metric of all dispatchers that were made here; `penstock_router_` comes before its name."""
        of_each = (each.get_sample_value(f"penstock_router_{name}", labels) for each in self._registries)
        return sum(value or 0.0 for value in of_each)

    def dispatcher(
        self, config: RouterConfig | None = None, registry: CollectorRegistry | None = None
    ) -> Dispatcher:
        """Make the dispatcher of another frontend; the caller enters it."""
        self.registry = registry or CollectorRegistry()
        self._registries.append(self.registry)
        return Dispatcher(
            self.discovery,
            self.plane,
            rng=random.Random(self.rng.getrandbits(64)),
            config=config,
            registry=self.registry,
        )

    def worker(self, name: str) -> Worker:
        return self._members[name].worker

    def engine(self, name: str) -> Engine:
        return self._members[name].engine

    @property
    def names(self) -> list[str]:
        """List workers that are still running."""
        return [name for name, member in self._members.items() if not member.task.done()]

    async def _run(self, name: str, worker: Worker) -> None:
        try:
            await worker.run()
        except PenstockError as error:
            self.errors[name] = error


def memory_transport() -> MemoryTransport:
    """Make a memory transport whose small transfers complete synchronously."""
    return MemoryTransport(threads=1, inline_bytes_max=1 << 20)


def _agent(name: str, transport: MemoryTransport) -> TransferAgent:
    """Make an agent that reaches other agents of this event loop, without sockets or threads."""
    return TransferAgent(name, TransferConfig(listen=("memory",)), transports=[transport])


class _MortalDiscovery:
    """One worker's client of the shared registry; it can be abandoned like a killed process."""

    def __init__(self, inner: MemoryDiscovery) -> None:
        self.dead = False
        self._inner = inner
        self._registrations: list[MemoryRegistration] = []

    async def register(self, instance: Instance) -> "_MortalRegistration":
        registration = await self._inner.register(instance)
        self._registrations.append(registration)
        return _MortalRegistration(self, registration)

    def watch(self) -> AsyncIterator[InstanceChange]:
        return self._inner.watch()

    async def close(self) -> None:
        """Do nothing: the registry is shared."""

    def abandon(self) -> None:
        self.dead = True
        for registration in self._registrations:
            registration.abandon()


class _MortalRegistration:
    def __init__(self, owner: _MortalDiscovery, inner: MemoryRegistration) -> None:
        self._owner = owner
        self._inner = inner

    async def update(self, instance: Instance) -> None:
        if not self._owner.dead:
            await self._inner.update(instance)

    async def close(self) -> None:
        if not self._owner.dead:
            await self._inner.close()
