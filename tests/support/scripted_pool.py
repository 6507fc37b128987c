"""The real pool of workers over processes by script: ready at once, they obey at once."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from penstock.core.ids import WorkerId
from penstock.core.types.instances import ModelCard
from penstock.deploy.messages import (
    Assignment,
    ChangeRole,
    ProcessOrder,
    ProcessSettings,
    Ready,
    Report,
    WorkerJob,
    WorkerRoleChanged,
)
from penstock.deploy.supervisor.member import ProcessMember
from penstock.deploy.supervisor.resources import Devices, ProcessCores
from penstock.deploy.supervisor.scale_file import ScaleFile
from penstock.deploy.supervisor.worker_pool import LocalWorkerPool, PoolWorker, WorkerCapacity
from penstock.graph import Graph, Supervision

CARD = ModelCard(name="m", context_length=64, block_size=16, salt=b"")
COMMON = ProcessSettings(
    graph_json="", runtime_dir="", hub_address="", secret=b"", hash_key=b"", log_level="info", supervisor_pid=1,
    heartbeat_interval_s=1.0,
)  # fmt: skip


_PATIENT = Supervision(liveness_timeout_s=1e6)  # processes by script send no heartbeats


class ScriptedProcess:
    """A worker's process: ready at once unless `is_slow`, and ends at a signal unless it `ignores` SIGTERM."""

    def __init__(self, *, is_slow: bool = False, ignores: bool = False, needs_prefill: bool = False) -> None:
        self.pid = 7
        self.told: list[ProcessOrder] = []
        self.refusal: WorkerRoleChanged | None = None
        self._reports: asyncio.Queue[Report | None] = asyncio.Queue()
        self._ended = asyncio.Event()
        self.ignores = ignores
        self._status = 0
        if not is_slow:
            self.say(Ready(needs_prefill=needs_prefill))

    def say(self, report: Report) -> None:
        self._reports.put_nowait(report)

    def end(self, status: int, *, closes: bool = True) -> None:
        """End; unless it `closes` its socket, what it started keeps that open."""
        if not self._ended.is_set():
            self._status = status
            if closes:
                self._reports.put_nowait(None)
            self._ended.set()

    async def report(self) -> Report | None:
        return await self._reports.get()

    async def wait(self) -> int:
        await self._ended.wait()
        return self._status

    def tell(self, news: ProcessOrder) -> None:
        self.told.append(news)
        if isinstance(news, ChangeRole):
            self.say(self.refusal or WorkerRoleChanged(role=news.role))

    def signal(self, number: signal.Signals) -> None:
        if not self.ignores:
            self.end(0 if number == signal.SIGTERM else -number)

    def kill(self) -> None:
        self.end(-9)

    def kill_at_once(self) -> None:
        self.end(-9)


class PoolScene:
    """A pool, its processes by name (the last of each), and its assignments."""

    def __init__(
        self, roles: Mapping[str, object], *, devices: int | None = None, file: ScaleFile | None = None
    ) -> None:
        graph = Graph.model_validate({"model": "m", "roles": roles})
        self.processes: dict[str, ScriptedProcess] = {}
        self.jobs: list[WorkerJob] = []
        self.next = ScriptedProcess
        self.make: Callable[[str], ScriptedProcess] = lambda _name: self.next()
        """Makes the process of the worker with this name."""
        self.restored = ""
        self.template = "old"
        """Template of workers that are added from now on."""
        self.devices = Devices(devices)
        self.pool = LocalWorkerPool(
            graph.roles.present(),
            room=WorkerCapacity(self.devices, ProcessCores(None), graph.router.workers_max),
            drain_s=30.0,
        )
        self._file = file

    def _make(self, worker: PoolWorker) -> ProcessMember:
        worker.template = self.template

        def assign() -> Assignment:
            job = WorkerJob(
                worker_id=WorkerId(1), role=worker.role, home=worker.home, card=CARD, model_dir="",
                index=worker.index, device=worker.devices[0] if worker.devices else 0,
            )  # fmt: skip
            self.jobs.append(job)
            return Assignment(name=worker.name, job=job, common=COMMON)

        async def start(assignment: Assignment) -> ScriptedProcess:
            process = self.processes[assignment.name] = self.make(assignment.name)
            return process

        return ProcessMember(worker.name, assign, _PATIENT, start=start, say=lambda *_: None)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[LocalWorkerPool]:
        """Run the pool; entered once its workers are ready."""
        self.restored = self.pool.fill(self._make, self._file)
        async with asyncio.TaskGroup() as group:
            self.pool.start(group)
            await self.pool.started()
            self.pool.open()
            try:
                yield self.pool
            finally:
                await self.pool.drain()
