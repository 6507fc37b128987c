"""A whole deployment on one virtual event loop: real dispatchers and workers, simulated hosts, network and engines."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from penstock.core.errors import PenstockError
from penstock.core.ids import WorkerId
from penstock.core.types.instances import Instance, Location, ModelCard, Prices, Role
from penstock.core.types.load import Step
from penstock.kv.manager import KvManager
from penstock.kv.pool import BlockPool
from penstock.perf.topology import NetworkPath
from penstock.router.config import RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.runtime.config import PlaneConfig
from penstock.runtime.discovery.view import InstanceTable, TableCursor, TableWatch
from penstock.seams import Engine, KvBlocks
from penstock.sim.engine_timing import HostPace
from penstock.sim.network import REGISTRY, NetworkConfig, SimNetwork, SimTransports
from penstock.sim.plane import SimPlane
from penstock.transfer import TransferAgent
from penstock.worker.config import WorkerConfig
from penstock.worker.registration import WorkerIdentity
from penstock.worker.worker import Worker

_RENEWALS_A_LEASE = 3


class SimRegistry:
    """The registry; `at` gives a host's client.

    Renewals are not simulated: a lease expires once its host could not reach the registry for `lease_ttl_s`. A worker that
    learns of its expired lease registers again.
    """

    def __init__(self, network: SimNetwork) -> None:
        self.network = network
        self.table = InstanceTable(watchers_max=1 << 16)
        self.table.mark_synced()
        self.registrations: dict[WorkerId, SimRegistration] = {}

    def at(self, host: str) -> "HostDiscovery":
        return HostDiscovery(self, host)

    def kill(self, host: str) -> None:
        """Stop renewing the host's leases."""
        for registration in [r for r in self.registrations.values() if r.host == host]:
            registration.abandon()

    def lose_lease(self, host: str) -> None:
        """Drop the host's registrations, as after a registry restart; the host registers again."""
        for registration in [r for r in self.registrations.values() if r.host == host]:
            registration.lapse("lease lost")


class HostDiscovery:
    """The `seams.Discovery` of one host."""

    def __init__(self, registry: SimRegistry, host: str) -> None:
        self.registry = registry
        self.host = host
        self.is_closed = False
        self._wakeups: list[asyncio.Event] = []

    async def register(self, instance: Instance) -> "SimRegistration":
        network = self.registry.network
        await network.reach(self.host, REGISTRY)
        registration = SimRegistration(self.registry, self.host, instance)
        await network.reach(REGISTRY, self.host)
        return registration

    def watch(self) -> "HostWatch":
        wakeup = asyncio.Event()
        wakeup.set()
        self._wakeups.append(wakeup)
        return HostWatch(self, self.registry.table.cursor(wakeup.set), wakeup)

    async def close(self) -> None:
        """End this host's watches; other hosts keep using the registry."""
        self.is_closed = True
        for wakeup in self._wakeups:
            wakeup.set()


class HostWatch(TableWatch):
    """Watch of `HostDiscovery.watch`; changes arrive over the network."""

    def __init__(self, discovery: HostDiscovery, cursor: TableCursor, wakeup: asyncio.Event) -> None:
        super().__init__(discovery, cursor, wakeup)
        self._discovery = discovery

    async def _wait_for_changes(self) -> None:
        if not self._discovery.is_closed:
            await self._discovery.registry.network.reach(REGISTRY, self._discovery.host)

    def __del__(self) -> None:
        super().__del__()
        self._discovery._wakeups.remove(self._wakeup)


class SimRegistration:
    """One worker's registration."""

    def __init__(self, registry: SimRegistry, host: str, instance: Instance) -> None:
        self.host = host
        self._registry = registry
        self._instance = instance
        self._timer: asyncio.TimerHandle | None = None  # end of the lease, or next registration
        self._is_listed = True
        self._is_alive = True
        registry.registrations[instance.worker_id] = self
        registry.table.put(instance)
        registry.network.add(self)

    @property
    def ends(self) -> tuple[str, str]:
        return self.host, REGISTRY

    async def update(self, instance: Instance) -> None:
        await self._registry.network.reach(*self.ends)
        if self._is_alive:
            self._instance = instance
            if self._is_listed:
                self._registry.table.put(instance)

    async def close(self) -> None:
        if not self._is_alive:
            return
        await self._registry.network.reach(*self.ends)
        self._end("withdrawn")

    def abandon(self) -> None:
        """Stop renewing: the process has ended."""
        self._is_alive = False
        self._registry.network.drop(self)
        if not self._is_listed:
            self._end("lease expired")
        elif self._timer is None:
            self._start(self._registry.network.config.lease_ttl_s, self._end)

    def lapse(self, reason: str = "lease expired") -> None:
        """Drop the registration; a running worker registers again when it reaches the registry."""
        if not self._is_alive:
            self._end(reason)
            return
        self._stop()
        self._is_listed = False
        self._registry.table.remove(self._instance.worker_id, reason)
        network = self._registry.network
        if network.is_open(*self.ends):
            self._start(network.config.lease_ttl_s / _RENEWALS_A_LEASE, self._return)

    def on_path(self, *, is_open: bool) -> None:
        if not is_open and self._is_listed and self._timer is None:
            self._start(self._registry.network.config.lease_ttl_s, self.lapse)
        elif is_open and self._is_listed:
            self._stop()
        elif is_open and self._timer is None:
            self._start(self._registry.network.latency_s(*self.ends), self._return)

    def _return(self) -> None:
        self._timer = None
        if self._is_alive and self._registry.network.is_open(*self.ends):
            self._is_listed = True
            self._registry.table.put(self._instance)

    def _end(self, reason: str = "lease expired") -> None:
        self._is_alive = self._is_listed = False
        self._stop()
        self._registry.network.drop(self)
        self._registry.registrations.pop(self._instance.worker_id, None)
        self._registry.table.remove(self._instance.worker_id, reason)

    def _start(self, delay_s: float, call: Callable[[], None]) -> None:
        self._stop()
        self._timer = asyncio.get_running_loop().call_later(delay_s, call)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class SimEngine(Engine, KvBlocks, Protocol):
    """A simulated engine, which may deliver finished steps late."""

    @property
    def pool(self) -> BlockPool:
        """Its block pool, after `start`."""
        ...

    @property
    def kv(self) -> KvManager | None:
        """The tiers below its device, after `start`; None without."""
        ...

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        ...

    def so_far(self) -> Step | None:
        """Give the undelivered results of finished steps."""
        ...


MakeEngine = Callable[[HostPace], SimEngine]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How to create the workers of one role. Adapters and location depend on the worker's start index."""

    make_engine: MakeEngine
    prices: Prices | None = None
    adapters_of: Callable[[int], Sequence[str]] = lambda _: ()
    location_of: Callable[[int], Location] = lambda _: Location()
    """Location of a worker; without a host it gets a host of its own. Frontends are at `router.location`."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Parts of a simulated deployment. With a PREFILL role all workers have KV transfer."""

    card: ModelCard
    workers: Mapping[Role, WorkerSpec]
    router: RouterConfig = field(default_factory=RouterConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    plane: PlaneConfig = field(default_factory=PlaneConfig)
    frontends: int = 1


@dataclass(slots=True, eq=False)
class SimWorker:
    """A worker on its own host. `is_draining` is set by `drain`."""

    name: str
    role: Role
    host: str
    worker: Worker
    engine: SimEngine
    pace: HostPace
    task: asyncio.Task[None]
    is_draining: bool = False


class SimCluster:
    """Workers by name, and the frontends' dispatchers. An async context; leaving it stops everything at once."""

    def __init__(self, spec: ClusterSpec, rng: random.Random) -> None:
        self.spec = spec
        self.network = SimNetwork(random.Random(rng.getrandbits(64)), spec.network, spec.router.topology)
        self.plane = SimPlane(self.network, spec.plane)
        self.registry = SimRegistry(self.network)
        self.sim_transports = SimTransports(self.network, self._kv_path)
        self.dispatchers: list[Dispatcher] = []
        self.errors: dict[str, PenstockError] = {}
        """Errors of workers that ended by one, by host."""
        self._rng = rng
        self._workers: dict[str, SimWorker] = {}
        self._numbers = 0
        self._started: Counter[Role] = Counter()
        self._places: dict[str, Location] = {}  # of all workers ever started
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        for _ in range(self.spec.frontends):
            await self.add_frontend(self.spec.router)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for dispatcher in self.dispatchers:
            await dispatcher.__aexit__(None, None, None)
        for name in tuple(self._workers):
            self.kill(name)
        await self._group.__aexit__(kind, error, trace)

    async def add_frontend(self, config: RouterConfig) -> Dispatcher:
        """Start one more dispatcher, on the next of `frontend_hosts`."""
        host = f"frontend-{len(self.dispatchers) + 1}"
        config = config.model_copy(update={"location": self._locate(host, config.location)})
        dispatcher = Dispatcher(
            self.registry.at(host),
            self.plane.at(host),
            rng=random.Random(self._rng.getrandbits(64)),
            config=config,
        )
        await dispatcher.__aenter__()
        self.dispatchers.append(dispatcher)
        return dispatcher

    @property
    def frontend_hosts(self) -> list[str]:
        return [f"frontend-{number}" for number in range(1, len(self.dispatchers) + 1)]

    @property
    def workers(self) -> Mapping[str, SimWorker]:
        """Running workers by name."""
        return self._workers

    async def start(
        self, name: str, role: Role = Role.AGGREGATED, *, index: int | None = None, home: Role | None = None
    ) -> SimWorker:
        """Start a worker on a new host; returns once it is registered or has failed.

        Args:
            name: its name.
            role: the role that it registers in.
            index: its number among the workers of its home role, from 0; None is the next one.
            home: the role whose settings it has; None is `role`.
        """
        self._numbers += 1
        home = home or role
        spec = self.spec.workers[home]
        number = self._started[home] if index is None else index
        self._started[home] += 1
        host, pace = f"{name}-{self._numbers}", HostPace()
        location = self._places[host] = self._locate(host, spec.location_of(number))
        engine = spec.make_engine(pace)
        worker = Worker(
            engine,
            self.registry.at(host),
            self.plane.at(host),
            identity=WorkerIdentity(WorkerId(self._numbers), name, role, location=location),
            card=self.spec.card,
            read_file=lambda _: None,
            prices=spec.prices,
            adapters=spec.adapters_of(number),
            config=self.spec.worker,
            agent=self._agent(host),
        )
        task = self._group.create_task(self._run(name, host, worker), name=f"worker {host}")
        self._workers[name] = running = SimWorker(name, role, host, worker, engine, pace, task)
        worker.on_role = partial(self._note_role, running)
        ready = self._group.create_task(worker.ready.wait())
        await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        return running

    def _agent(self, host: str) -> TransferAgent | None:
        """Create the transfer agent of a host's worker; None without a PREFILL role."""
        if Role.PREFILL not in self.spec.workers:
            return None
        config = self.spec.worker.kv_transfer.transfer.model_copy(
            update={"listen": ("memory",), "transports": None}
        )
        return TransferAgent(host, config, transports=[self.sim_transports.at(host)])

    def _kv_path(self, one: str, other: str) -> NetworkPath:
        """Give the network path between two workers, as routers assume it."""
        return self.spec.router.kv_path(self._places[one], self._places[other])

    def _locate(self, host: str, location: Location) -> Location:
        """Set a host's location; a host without one stays unlocated."""
        located = location if location.host else location.model_copy(update={"host": host})
        if location != Location():
            self.network.locate(host, located)
        return located

    def settle(self, name: str) -> None:
        """Deliver a worker's finished steps to its frontends, as an engine that runs every step has done."""
        worker = self._workers[name]
        step = worker.engine.so_far()
        if step is not None:
            worker.worker._on_step(step)
            self.plane.hurry(worker.host)

    def kill(self, name: str) -> None:
        """Kill a worker like a process: connections break, its lease expires, no goodbye is sent."""
        worker = self._workers.pop(name)
        self.registry.kill(worker.host)
        self.plane.kill(worker.host)
        worker.task.cancel()

    def drain(self, name: str) -> None:
        """Drain a worker: it finishes its requests and ends."""
        worker = self._workers[name]
        worker.is_draining = True
        worker.worker.stop()

    def _note_role(self, worker: SimWorker, role: Role) -> None:
        worker.role = role
        worker.worker.recorder.begin(role)

    async def _run(self, name: str, host: str, worker: Worker) -> None:
        try:
            await worker.run()
        except PenstockError as error:
            self.errors[host] = error
        finally:
            running = self._workers.get(name)
            if running is not None and running.host == host:
                del self._workers[name]
