"""A deployment on this machine: the supervisor, which runs the hub, with frontends and workers as child processes."""

import asyncio
import ipaddress
import itertools
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from penstock.core.clock import wall_time_s
from penstock.core.errors import ConfigError, RequestError
from penstock.core.listening import Address
from penstock.core.types.instances import Role
from penstock.deploy.card import check_model, frontend_drain_s, served_name, worker_drain_s
from penstock.deploy.control.hosted import DeploymentOrigin, DeploymentRecord, keep_record, unnamed_file
from penstock.deploy.control.messages import ProcessView, RunningDeployment
from penstock.deploy.control.server import ControlServer, ProbeServer
from penstock.deploy.identity import deployment_secret, has_secret, location_here, shared_hash_key
from penstock.deploy.messages import Assignment, Job, ProcessSettings, WorkerJob, cause_of
from penstock.deploy.planes import Planes
from penstock.deploy.state import (
    OUTPUT_LOG,
    PLANNER_LOG,
    RuntimeDirectory,
    load_admin_token,
    load_hash_key,
    state_dir,
)
from penstock.deploy.supervisor.applier import Applier
from penstock.deploy.supervisor.child import Child, GroupGuard, SpareProcesses
from penstock.deploy.supervisor.frontends import FrontendProcesses, Port, say_open
from penstock.deploy.supervisor.links import Links, LinkTemplate, check_links, link_templates
from penstock.deploy.supervisor.local_part import LocalPart, roles_here, runnable_roles
from penstock.deploy.supervisor.member import ProcessMember, tick_s
from penstock.deploy.supervisor.output import LogFile, ProcessOutput
from penstock.deploy.supervisor.planning import PlannerPlace, Planning, make_planning, planner_place
from penstock.deploy.supervisor.resources import (
    Devices,
    HostArena,
    PortRange,
    Ports,
    ProcessCores,
    count_devices,
    expect_cores,
    usable_cores,
)
from penstock.deploy.supervisor.scale_file import ScaleFile
from penstock.deploy.supervisor.template import WorkerTemplate, read_model
from penstock.deploy.supervisor.worker_pool import LocalWorkerPool, PoolWorker, WorkerCapacity
from penstock.engine.registry import engine_kind
from penstock.frontend.http.server import ServerTls
from penstock.frontend.limits.keys import API_KEY_VARIABLE, read_tenants, stored_digest
from penstock.graph import Graph, RoleSpec
from penstock.graph.partners import say_empty, say_small_kv
from penstock.graph.runtime import RuntimeSpec
from penstock.planner.observation import ObservationStream
from penstock.runtime.discovery.local import LocalHub
from penstock.runtime.handshake import Identity
from penstock.runtime.kubernetes import KubernetesAccess
from penstock.runtime.observations import Window
from penstock.runtime.tls import PlaneTls

_RESOLVE_S = 10.0


@dataclass(frozen=True, slots=True)
class SharedState:
    """What all processes of this host share, and the hub where this host has one."""

    common: ProcessSettings
    hub: LocalHub | None


async def create_shared(
    graph: Graph, stack: AsyncExitStack, *, log_level: str, admin_token: str
) -> SharedState:
    """Create it; `stack` ends it.

    Raises:
        ConfigError: a secret is missing, a file is unreadable, an address cannot be listened on, or a name cannot be resolved
            or used.
        Unavailable: the registry of another host does not answer or refuses this one.
    """
    spec = graph.runtime
    secret = deployment_secret(spec)
    listen, advertise = worker_address(spec)
    location_here(graph.router.location)  # said before anything starts
    await _expect_resolvable("runtime.advertise", advertise)
    transfer = graph.worker.kv_transfer.transfer
    await _expect_resolvable("worker.kv_transfer.transfer.advertise", transfer.advertise or "")
    is_shared = spec.spans_hosts or spec.leader is not None or (bool(graph.regions) and has_secret(spec))
    hash_key = shared_hash_key(secret, graph.name) if is_shared else load_hash_key(state_dir(graph.name))
    directory = RuntimeDirectory()
    stack.callback(directory.remove)
    identity = Identity(process="supervisor", hash_key=hash_key, secret=secret)
    hub = None
    if spec.discovery == "local" and spec.join is None:
        hub = await start_hub(spec, identity, f"unix://{directory.path}/hub.sock", stack)
    common = ProcessSettings(
        graph_json=graph.model_dump_json(),
        runtime_dir=str(directory.path),
        hub_address=spec.join or (hub.address if hub else ""),
        secret=secret,
        hash_key=hash_key,
        log_level=log_level,
        supervisor_pid=os.getpid(),
        admin_token=admin_token,
        heartbeat_interval_s=tick_s(graph.supervision),
        listen=listen,
        advertise=advertise,
    )
    if hub is None or graph.runtime.events != "direct":
        planes = Planes(graph, common, identity, rng=random.Random())
        async with planes:  # said before anything starts
            await planes.connect()
    return SharedState(common, hub)


def worker_address(spec: RuntimeSpec) -> tuple[str, str]:
    """Say where workers of this host listen, and the host that they register.

    Returns:
        the address, empty for private sockets; the host, empty for that of the address.

    Raises:
        ConfigError: workers would listen on every address, and nothing says which one others reach.
    """
    if spec.listen is None and not spec.spans_hosts:
        return "", ""
    if spec.listen is not None:
        address = Address.parse(spec.listen, source="runtime.listen")
    else:
        address = Address(host=_own_host(spec))
    if _is_any(address.host) and not spec.advertise:
        where = "runtime.listen" if spec.listen is not None else "runtime.hub"
        raise ConfigError(
            f"{where}: {address.host} is every address of this host, of which workers register one; set runtime.advertise"
        )
    return str(address), spec.advertise or ""


async def start_hub(spec: RuntimeSpec, identity: Identity, private: str, stack: AsyncExitStack) -> LocalHub:
    """Start the hub; one that other hosts reach keeps a registration for a lease, as networks break where processes live.

    Raises:
        ConfigError: this host does not have its address, or the port is in use.
    """
    config, tls = spec.registry, None
    if spec.hub is not None:
        config = config.model_copy(update={"linger_s": max(config.linger_s, config.lease_ttl_s)})
        tls = PlaneTls.of(spec.tls)
        if tls is not None:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(group.create_task(tls.watch(), name="certificates").cancel)
    hub = LocalHub(identity, listen=spec.hub or private, tls=tls, config=config)
    try:
        await hub.start()
    except ConfigError as error:
        if spec.hub is None:
            raise
        raise ConfigError(
            f"runtime.hub: {error.message}; where another supervisor has the registry, join it by --join {spec.hub}"
        ) from error
    stack.push_async_callback(hub.close)
    return hub


def _own_host(spec: RuntimeSpec) -> str:
    """Give the address of this host that the others reach: of the hub here, or by which this host reaches the other one's."""
    if spec.hub is not None:
        return Address.parse(spec.hub, source="runtime.hub").host
    if spec.join is not None:
        field, there = "runtime.join", Address.parse(spec.join, source="runtime.join")
    else:
        if spec.discovery == "kubernetes":
            field, parts = "kubernetes", urlsplit(KubernetesAccess.find().server)
        else:
            field, parts = "runtime.urls", urlsplit(spec.urls[0])
        there = Address(host=parts.hostname or "", port=parts.port or 1)
    try:
        family, _, _, _, place = socket.getaddrinfo(there.host, there.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            host: str = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"{field}: {there}: {error.strerror or error}; expected an address that this host reaches"
        ) from error
    return host


async def _expect_resolvable(field: str, host: str) -> None:
    """Check that a name that other hosts shall use has an address.

    Raises:
        ConfigError: it has none, as far as this host knows.
    """
    if not host:
        return
    try:
        async with asyncio.timeout(_RESOLVE_S):
            await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"{field}: {host!r} cannot be resolved here: {why or f'no answer within {_RESOLVE_S:g} s'}; expected an address,"
            " or a host name that all hosts resolve"
        ) from error


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a host name


if TYPE_CHECKING:
    from penstock.runtime.discovery.local import LocalHub

Say = Callable[[str, str, str], None]
Start = Callable[[Assignment], Awaitable[Child]]
_WORKER_MODULE = "penstock.deploy.processes.worker_process"


class LocalDeployment:
    """Runs a graph on this machine, for as long as its context.

        async with LocalDeployment(graph) as deployment:
            ...  # deployment.url answers

    Entering waits until every process is ready. Leaving drains: frontends take no new request and finish their streams,
        then workers end; no process, socket or directory remains. Leaving by an exception does not drain. If the deployment
        fails for good, the body is cancelled and leaving raises the error. One task owns it.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        log_level: str = "warning",
        say: Say | None = None,
        part: LocalPart | None = None,
        origin: DeploymentOrigin | None = None,
    ) -> None:
        """Check the graph; starts nothing.

        Args:
            graph: the deployment.
            log_level: log level of the child processes, which log on stderr.
            say: called with (name, state, detail) at every change of state.
            part: what of the graph runs here; None for all.
            origin: how a command started it; None within a program, which no command ends.

        Raises:
            ConfigError: the graph has a setting that only simulations support.
        """
        self._part = part = part or LocalPart()
        self._roles = roles_here(part, graph)
        self.frontends = FrontendProcesses(graph.frontend.processes if part.has_frontends else 0)
        if self.frontends.count:
            check_links(graph)
        if graph.frontend.tls is not None:
            ServerTls(graph.frontend.tls)  # said before anything starts
        self.asks_for_keys = bool(read_tenants(graph.frontend.api_key_file))
        """Whether requests need an API key. Each frontend reads the key file by itself, now and when it changes."""
        cores = usable_cores() if graph.worker.own_cores else None
        if cores is not None:
            expect_cores(self._roles, cores)
        self._cores = ProcessCores(cores)
        self.graph = graph
        self.url = ""
        """URL of the frontends, once entered; empty if none run here."""
        self.admin_token = ""
        """Token of `/admin`, once entered."""
        self.hub: LocalHub | None = None
        """The registry, once entered; None if another host runs the registry."""
        self._log_level = log_level
        self._origin = origin
        self.output = ProcessOutput()
        """What the processes print."""
        self._told: Say = say or (lambda *_: None)
        self.pool = LocalWorkerPool(
            self._roles,
            room=WorkerCapacity(
                Devices(count_devices()),
                self._cores,
                graph.router.workers_max,
                Ports(None if graph.runtime.ports is None else PortRange.parse(graph.runtime.ports)),
            ),
            drain_s=worker_drain_s(graph),
        )
        """The workers; once entered, `add`, `retire` and `flip` change them."""
        self.links = Links(self._link_member)
        """To other regions, where frontends run."""
        self.applier = Applier(
            graph,
            part=part,
            pool=self.pool,
            make_templates=self._templates,
            links=self.links,
            make_links=self._link_templates,
            say=self._say,
        )
        """Changes the workers and links to those of another graph."""
        self.observations = ObservationStream()
        """What frontends and workers see, by windows of a second."""
        self._guard = GroupGuard()
        spares = graph.supervision.spare_processes if self._roles else 0
        self._spares = SpareProcesses(spares, _imports(self._roles), self._guard, self.output)
        self._place: PlannerPlace
        self._host_arena: HostArena
        self._common: ProcessSettings
        self._context = self._run()

    @property
    def api_key(self) -> str | None:
        """The API key of this process's environment; None without. Of others only hashes are known."""
        given = os.environ.get(API_KEY_VARIABLE, "").strip()
        return given if given and stored_digest(given) is None else None

    @property
    def members(self) -> list[ProcessMember]:
        return [*self.pool.members, *self.links.members, *self.frontends.members]

    def processes(self) -> tuple[ProcessView, ...]:
        """Describe the processes, frontends first."""
        return (*self.frontends.processes(), *self.pool.processes(), *self.links.processes())

    def pids(self) -> dict[str, int]:
        """Return the running processes' ids by name."""
        return {member.name: member.pid for member in self.members if member.pid is not None}

    def kill(self) -> None:
        """End every process at once, without draining."""
        for member in self.members:
            member.kill()

    async def __aenter__(self) -> Self:
        await self._context.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._context.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.enter_context(self.output)
            port = None
            if self.frontends.count:
                port = stack.enter_context(Port(self.graph.frontend.host, self.graph.frontend.port))
                self.url = port.url("http" if self.graph.frontend.tls is None else "https")
            self.admin_token = load_admin_token()
            await self._answer_probes(stack)
            check_model(self.graph)
            self._say("penstock", "starting", f"model {served_name(self.graph)}")
            self._say_warnings(port)
            model = await read_model(self.graph, self._roles)
            self._host_arena = stack.enter_context(HostArena(self._roles))
            shared = await create_shared(
                self.graph, stack, log_level=self._log_level, admin_token=self.admin_token
            )
            common, self.hub = shared.common, shared.hub
            scale_file = stack.enter_context(
                ScaleFile(
                    state_dir(self.graph.name),
                    {name: role.replicas for name, role in self._roles.items()},
                    spans_hosts=self.graph.runtime.spans_hosts,
                    graph=unnamed_file(self.graph, self._origin),
                )
            )
            directory = self._keep_record(Path(common.runtime_dir), scale_file)
            await stack.enter_async_context(self._guard)
            await stack.enter_async_context(self._spares)
            self._common = common
            self.applier.use(model.templates(self.graph, self._roles, common))
            await self._create_members(common, port, scale_file)
            planning = await self._make_planning(stack, model.path, directory / PLANNER_LOG)
            await stack.enter_async_context(
                ControlServer(
                    self.pool,
                    self.observations,
                    Path(common.runtime_dir),
                    RunningDeployment(
                        name=self.graph.name,
                        url=self.url,
                        pid=os.getpid(),
                        planner_log=str(directory / PLANNER_LOG) if planning else "",
                        spans_hosts=self.graph.runtime.spans_hosts,
                    ),
                    processes=self.processes,
                    applier=self.applier,
                    kill=self.pool.crash if self.graph.frontend.page.kills_workers else None,
                )
            )
            try:
                async with asyncio.TaskGroup() as group:
                    self._start(group)
                    try:
                        await self.pool.started()
                        self.pool.open()  # before frontends: they wait for a first worker, which may be the planner's to start
                        rounds = group.create_task(planning.run(), name="planner") if planning else None
                        await self.frontends.started()
                        self.frontends.open()
                        self.applier.open(group, scale_file)
                        self._spares.refill()
                        yield
                        self.applier.close()
                        if rounds is not None:
                            rounds.cancel()
                    except BaseException:
                        self.kill()
                        raise
                    await self.frontends.drain(frontend_drain_s(self.graph))
                    await self.links.drain(worker_drain_s(self.graph))
                    await self.pool.drain()
                    await self.pool.close()
            except BaseExceptionGroup as errors:
                raise cause_of(errors) from None

    def _start(self, group: asyncio.TaskGroup) -> None:
        for part in (self.pool, self.frontends, self.links):
            part.start(group)

    async def _make_planning(self, stack: AsyncExitStack, model_dir: Path, log: Path) -> Planning | None:
        """Make the planner where it runs here, and connect to it where it runs on another host; `stack` ends both."""
        has_planner = self._part.plans(self.graph)
        self._place = await stack.enter_async_context(
            planner_place(
                self.graph,
                self._common,
                self.pool,
                self.frontends,
                self.observations,
                has_planner=has_planner,
            )
        )
        if not has_planner:
            return None
        planning = make_planning(
            self.graph,
            runnable_roles(self.graph),
            self._place.connector,
            self._place.observations,
            model_dir=model_dir,
            log_path=log,
            say=self._say,
            tell=self._place.tell,
        )
        return None if planning is None else stack.enter_context(planning)

    def _say(self, name: str, state: str, detail: str) -> None:
        """Tell a change of state, and keep it in the log."""
        self.output.note(name, f"{state:<9} {detail}".rstrip())
        self._told(name, state, detail)

    def _keep_record(self, runtime: Path, scale_file: ScaleFile) -> Path:
        """Write what commands need to know of this deployment, and begin its log.

        Returns:
            the directory of its logs: that of another deployment of this name is left alone.

        Raises:
            ConfigError: the disk is full.
        """
        directory = state_dir(self.graph.name) if scale_file.is_ours else runtime
        self._guard.directory = runtime
        self.output.log = LogFile(directory / OUTPUT_LOG)
        tls = self.graph.frontend.tls
        record = DeploymentRecord(
            name=self.graph.name,
            pid=os.getpid(),
            started_s=wall_time_s(),
            stop_s_max=frontend_drain_s(self.graph) + self.pool.drain_s,
            log=str(self.output.log.path),
            origin=self._origin,
            url=self.url,
            certificate="" if tls is None or not self.url else str(Path(tls.certificate).resolve()),
        )
        keep_record(runtime, record)
        return directory

    async def _answer_probes(self, stack: AsyncExitStack) -> None:
        if self.graph.runtime.probes is not None:
            await stack.enter_async_context(ProbeServer(self.graph.runtime.probes, self._waits_for))

    def _say_warnings(self, port: Port | None) -> None:
        warnings = (
            say_open(port, is_open=not self.asks_for_keys) if port else (),
            say_small_kv(self.graph.roles, self.graph.block_size),
        )
        for line in itertools.chain(*warnings):
            self._say("penstock", "warning", line)
        for line in say_empty(self.graph.roles):
            self._say("penstock", "starting", line)

    def _waits_for(self) -> dict[str, str]:
        """Say what each process of this host that is not ready does, by name."""
        if not self.members:
            return {"penstock": "reads the model"}
        return {
            member.name: member.phase
            for member in self.members
            if member.is_stopping or not member.ready.is_set()
        }

    async def _create_members(
        self,
        common: ProcessSettings,
        port: Port | None,
        scale_file: ScaleFile,
    ) -> None:
        """Create frontends, links, and the pool with the workers of the scale file or the graph.

        Raises:
            ConfigError: this machine lacks devices or cores for the graph's workers.
        """

        def worker_member(worker: PoolWorker) -> ProcessMember:
            template = self.applier.templates[worker.home]
            worker.template = template.key

            def job() -> WorkerJob:
                return template.job(worker, self._host_arena.part(worker.home, worker.index))

            cores = partial(self._cores.of_process, worker.name)
            return self._member(worker.name, job, template.common, cores, self._spares.start)

        def frontend_member(name: str, job: Callable[[], Job]) -> ProcessMember:
            start = partial(Child.start, guard=self._guard, output=self.output)
            return self._member(name, job, common, self._cores.of_process, start)

        self.pool.on_end = self._forget
        try:
            if restored := self.pool.fill(worker_member, scale_file):
                self._say("penstock", "starting", restored)
        except RequestError as error:
            raise ConfigError(f"roles: {error.message}") from error
        self.frontends.fill(frontend_member, port, Path(common.runtime_dir))
        self.links.change(await self._link_templates(self.graph))

    async def _templates(self, graph: Graph, roles: Mapping[Role, RoleSpec]) -> dict[Role, WorkerTemplate]:
        """Make the templates of another graph's roles; raises ConfigError."""
        model = await read_model(graph, roles)
        return model.templates(graph, roles, self._common)

    async def _link_templates(self, graph: Graph) -> dict[str, LinkTemplate]:
        """Make the templates of another graph's links; raises ConfigError."""
        if not self.frontends.count or not graph.regions:
            return {}
        check_links(graph)
        return link_templates(graph, await read_model(graph, {}), self._common)

    def _link_member(self, name: str, template: LinkTemplate) -> ProcessMember:
        member = self._member(name, template.job, template.common, tuple, self._spares.start)
        member.on_window = lambda _window: None  # its region's planner counts what it serves
        member.on_ready = self.frontends.tell_failures
        return member

    def _observe(self, name: str, window: Window) -> None:
        self.observations.put(name, window)
        self._place.window(name, window)

    def _forget(self, name: str) -> None:
        self.observations.forget(name)
        self._place.forget(name)

    def _note_ready(self, name: str) -> None:
        """Expect the windows of a process, tell a frontend what it missed, and start missing spare processes.

        These wait until all workers are ready; earlier they would slow the others' start.
        """
        self.observations.expect(name)
        self._place.expect(name)
        self.frontends.tell_failures()
        if self.frontends.is_open:
            self._spares.refill()

    def _member(
        self,
        name: str,
        job: Callable[[], Job],
        common: ProcessSettings,
        cores: Callable[[], tuple[int, ...]],
        start: Start,
    ) -> ProcessMember:
        member = ProcessMember(
            name,
            lambda: Assignment(name=name, job=job(), common=common, cores=cores()),
            self.graph.supervision,
            start=start,
            say=self._say,
        )
        member.on_window = partial(self._observe, name)
        member.on_failure = self.frontends.note_failure
        member.on_ready = partial(self._note_ready, name)
        return member


def _imports(roles: dict[Role, RoleSpec]) -> tuple[str, ...]:
    """List the modules that workers of these roles import."""
    engines = sorted({role.engine for role in roles.values()})
    return (_WORKER_MODULE, *(module for engine in engines for module in engine_kind(engine).modules))
