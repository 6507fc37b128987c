"""The worker process: one engine driven by a `Worker`, listening on a socket in the runtime directory."""

import asyncio
import dataclasses
import os
import random
from functools import partial
from pathlib import Path

import msgspec
from pydantic import SecretStr

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.listening import Address
from penstock.core.log import get_logger
from penstock.core.types.instances import BecomeRole, Distance, Location, Prices, Role
from penstock.core.types.kv import KvReport
from penstock.deploy.identity import location_here
from penstock.deploy.messages import (
    Assignment,
    Closing,
    Health,
    ProcessHeartbeat,
    ProcessSettings,
    Ready,
    StartPhase,
    Tell,
    WorkerJob,
    WorkerRoleChanged,
    report_of,
)
from penstock.deploy.planes import Planes
from penstock.deploy.processes.control import Control
from penstock.deploy.processes.engine_spec import engine_spec
from penstock.deploy.processes.frontend_process import tracing
from penstock.deploy.processes.nodes import gather_nodes
from penstock.engine.batched import BatchedEngine
from penstock.engine.paged.checkpoint import Checkpoint
from penstock.engine.registry import create_engine, engine_kind
from penstock.engine.spec import EngineSpec
from penstock.graph import Graph, RoleSpec
from penstock.graph.engine_prices import engine_prices
from penstock.graph.regions import link_role
from penstock.runtime.handshake import Identity
from penstock.runtime.observations import GpuMeter, gpu_names
from penstock.seams import Engine
from penstock.transfer import TransferAgent
from penstock.transfer.config import TlsConfig
from penstock.worker.files import ModelFiles
from penstock.worker.registration import WorkerIdentity
from penstock.worker.worker import Worker

_log = get_logger()


async def run_worker(
    assignment: Assignment, job: WorkerJob, stopping: asyncio.Event, tell: Tell, control: Control
) -> None:
    """Serve until `stopping`, then finish requests in flight.

    Raises:
        ConfigError: the model or a setting is invalid.
        EngineError: the engine died.
    """
    common = _listening(assignment.common, job)
    graph = Graph.model_validate_json(common.graph_json)
    role, location, distance = _place_of(graph, job)
    name = assignment.name
    identity = Identity(process=name, worker_id=job.worker_id, hash_key=common.hash_key, secret=common.secret)
    checkpoint = Checkpoint.open(job.model_dir)
    spec = engine_spec(
        graph,
        role,
        checkpoint,
        card=job.card,
        index=job.index,
        device_index=job.device,
        core=job.core,
        adapters=job.adapters,
        hash_key=common.hash_key,
        host_part=job.host_part,
    )
    planes = Planes(graph, common, identity, rng=random.Random())
    given = [] if graph.chat_template is None else [graph.chat_template.encode()]
    async with (
        gather_nodes(graph, job.home or job.role, checkpoint, identity, tell) as gathered,
        tracing(graph.tracing, "penstock-worker", name),
        planes,
    ):
        tell(StartPhase(what="loads the engine"))
        spec = dataclasses.replace(spec, nodes=gathered.nodes)
        engine = create_engine(role.engine, spec)
        worker = Worker(
            engine,
            planes.discovery,
            planes.requests,
            identity=WorkerIdentity(
                worker_id=job.worker_id,
                name=f"{name}@{location_here(location).host}" if graph.runtime.spans_hosts else name,
                role=job.role,
                pid=os.getpid(),
                engine=role.engine,
                location=location,
                distance=distance,
            ),
            card=job.card,
            prices=_prices(role, Path(job.model_dir)),
            adapters=job.adapters,
            read_file=ModelFiles(Path(job.model_dir), job.card.files, given).read,
            config=graph.worker,
            agent=_transfer_agent(graph, job, name, common),
        )
        worker.on_closing = partial(_tell_closing, tell)
        worker.on_role = partial(_note_role, worker, tell)
        control.on_drain = worker.stop
        control.on_change_role = partial(_change_role, worker, job.role, tell)
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(_tell_ready(worker, engine, role, tell, control)),
                group.create_task(_observe(worker, control, _gpu_meter(spec, role, job.device))),
                group.create_task(_stop_when(stopping, worker)),
                group.create_task(gathered.watch(worker.stop)),
            ]
            try:
                await worker.run()
            finally:
                for task in beside:
                    task.cancel()
        gathered.check_left()


def _place_of(graph: Graph, job: WorkerJob) -> tuple[RoleSpec, Location, Distance | None]:
    """Give a worker's settings, where it is, and how far away where it says so itself: a link is in the region that it leads to."""
    if not job.region:
        role = graph.roles.present()[job.home or job.role]
        return role, location_here(role.location_of(job.index)), None
    region = next(each for each in graph.regions if each.name == job.region)
    far = region.distance
    said = (
        None
        if far is None
        else Distance(latency_s=far.latency_s, bandwidth_bytes_per_s=far.bandwidth_bytes_per_s)
    )
    role = link_role(region, location_here(graph.router.location).region)
    return role, Location(region=region.name), said


def _listening(common: ProcessSettings, job: WorkerJob) -> ProcessSettings:
    """Have the worker listen for requests on its own port, where it has one."""
    if not job.ports:
        return common
    address = Address(host=Address.parse(common.listen).host, port=job.ports[0])
    return msgspec.structs.replace(common, listen=str(address))


def _transfer_agent(graph: Graph, job: WorkerJob, name: str, common: ProcessSettings) -> TransferAgent:
    """Create the KV transfer agent; it is idle until the first KV transfer, unless the role is prefill or decode.

    It listens where the worker does, unless the graph says where.
    """
    config, tls = graph.worker.kv_transfer.transfer, graph.runtime.tls
    changes: dict[str, object] = {"secret": SecretStr(common.secret.hex())}
    if common.listen and not any(address.startswith("tcp://") for address in config.listen):
        port = job.ports[1] if job.ports else 0
        address = Address(host=Address.parse(common.listen).host, port=port)
        changes["listen"] = (*config.listen, str(address))
    if common.advertise and config.advertise is None:
        changes["advertise"] = common.advertise
    if tls is not None and config.tls is None:
        changes["tls"] = TlsConfig(certificate=tls.certificate, key=tls.key, authority=tls.authority)
    return TransferAgent(f"{name}-{job.worker_id}", config.model_copy(update=changes))


def _prices(role: RoleSpec, model_dir: Path) -> Prices | None:
    """Give the worker's prices; None where nobody said on what hardware a server elsewhere runs."""
    if engine_kind(role.engine).is_elsewhere and role.hardware == "cpu" and role.profile is None:
        return None
    try:
        return engine_prices(role, model_dir)
    except ConfigError as error:
        _log.warning("worker_has_no_prices", reason=error.message)
        return None


async def _tell_ready(worker: Worker, engine: Engine, role: RoleSpec, tell: Tell, control: Control) -> None:
    await worker.ready.wait()
    assert worker.instance is not None, "ready"
    control.pulse = partial(pulse, engine)
    worker.on_health = lambda problem: tell(Health(problem=problem or ""))
    instance = worker.instance
    blocks = instance.engine.total_blocks
    tell(
        Ready(
            detail=f"{role.engine}  {instance.card.name}" + (f"  {blocks} blocks" if blocks else ""),
            needs_prefill=instance.engine.transferred_prompts_only,
            kv_tiers=engine.tier_lines if isinstance(engine, BatchedEngine) else (),
        )
    )


async def _observe(worker: Worker, control: Control, meter: GpuMeter | None) -> None:
    await worker.ready.wait()
    if meter is None:
        await control.observe(worker.observe)
        return
    async with asyncio.TaskGroup() as group:
        group.create_task(meter.run())
        await control.observe(lambda: msgspec.structs.replace(worker.observe(), gpu=meter.latest))


def _gpu_meter(spec: EngineSpec, role: RoleSpec, first: int) -> GpuMeter | None:
    """Open the meter of the worker's GPUs; None where it computes on none."""
    if not spec.device.startswith("cuda") or not engine_kind(role.engine).has_weights:
        return None
    return GpuMeter.open(gpu_names(first, role.devices_per_node, os.environ))


def _note_role(worker: Worker, tell: Tell, role: Role) -> None:
    worker.recorder.begin(role)
    tell(WorkerRoleChanged(role=role))


def _change_role(worker: Worker, first: Role, tell: Tell, role: Role) -> None:
    """Change the worker's role; a refusal is told with the role that it keeps, `first` before it registered."""

    def answer(outcome: PenstockError | KvReport | None) -> None:
        if isinstance(outcome, PenstockError):
            kept = first if worker.instance is None else worker.instance.role
            tell(WorkerRoleChanged(role=kept, problem=outcome.to_info()))

    worker.change(BecomeRole(role=role), answer)


def _tell_closing(tell: Tell, cause: BaseException | None) -> None:
    if cause is not None and not isinstance(cause, asyncio.CancelledError):
        tell(report_of(cause))
    tell(Closing())


def pulse(engine: Engine) -> ProcessHeartbeat:
    load = engine.load()
    return ProcessHeartbeat(steps=load.steps, has_requests=load.running_requests + load.waiting_requests > 0)


async def _stop_when(stopping: asyncio.Event, worker: Worker) -> None:
    await stopping.wait()
    worker.stop()
