"""A follower's supervisor: keeps one process that runs the engine's processes of this node, and restarts it when it ends."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from penstock.core.clock import wall_time_s
from penstock.core.errors import ConfigError, RequestError
from penstock.core.types.instances import Role
from penstock.deploy.card import check_model, served_name, worker_drain_s
from penstock.deploy.control.hosted import DeploymentOrigin, DeploymentRecord, keep_record
from penstock.deploy.control.server import ProbeServer
from penstock.deploy.identity import deployment_secret, shared_hash_key
from penstock.deploy.messages import Assignment, FollowerJob, ProcessSettings, cause_of
from penstock.deploy.state import OUTPUT_LOG, RuntimeDirectory
from penstock.deploy.supervisor.child import Child, GroupGuard
from penstock.deploy.supervisor.member import ProcessMember, tick_s
from penstock.deploy.supervisor.output import LogFile, ProcessOutput
from penstock.deploy.supervisor.resources import Devices, count_devices, devices_of
from penstock.deploy.supervisor.template import read_model
from penstock.graph import Graph

_KILL_AFTER_S = 5.0


class FollowerHost:
    """Runs a follower on this node while `running` is entered. One task owns it."""

    def __init__(
        self,
        graph: Graph,
        role: Role,
        rank: int,
        *,
        origin: DeploymentOrigin,
        log_level: str,
        say: Callable[[str, str, str], None],
    ) -> None:
        """Start nothing yet.

        Args:
            graph: the deployment's, equal to the leader's.
            role: of the worker.
            rank: of this node among the worker's, from 1.
            origin: how it was started, for `penstock ps` and `down`.
            log_level: of the process.
            say: called with (name, state, detail) at every change of state.
        """
        self.graph = graph
        self.output = ProcessOutput()
        """Output of the follower's process."""
        self._role, self._rank = role, rank
        self._origin, self._log_level = origin, log_level
        self._on_state = say
        self._member: ProcessMember | None = None

    def kill(self) -> None:
        """End the process at once."""
        if self._member is not None:
            self._member.kill()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the follower; leaving the context waits until the leader's worker has drained.

        Raises:
            ConfigError: this node cannot run the engine's processes.
        """
        graph, guard = self.graph, GroupGuard()
        spec = graph.roles.present()[self._role]
        async with AsyncExitStack() as stack:
            stack.enter_context(self.output)
            if graph.runtime.probes is not None:
                await stack.enter_async_context(ProbeServer(graph.runtime.probes, self._waits_for))
            check_model(graph)
            self._say(
                "penstock", "starting", f"model {served_name(graph)}  node {self._rank} of {spec.nodes}"
            )
            secret = deployment_secret(graph.runtime)
            model = await read_model(graph, {self._role: spec})
            try:
                devices = Devices(count_devices()).take(f"node {self._rank}", devices_of(spec))
            except RequestError as error:
                raise ConfigError(f"roles.{self._role}: {error.message}") from error
            directory = RuntimeDirectory()
            stack.callback(directory.remove)
            guard.directory = directory.path
            self._keep_record(directory.path, f"node {self._rank} of {spec.nodes}")
            await stack.enter_async_context(guard)
            job = FollowerJob(
                role=self._role,
                rank=self._rank,
                model_dir=str(model.path),
                device=devices[0] if devices else 0,
            )
            common = ProcessSettings(
                graph_json=graph.model_dump_json(),
                runtime_dir=str(directory.path),
                hub_address="",
                secret=secret,
                hash_key=shared_hash_key(secret, graph.name),
                log_level=self._log_level,
                supervisor_pid=os.getpid(),
                heartbeat_interval_s=tick_s(graph.supervision),
            )
            name = f"follower-{self._rank}"
            member = self._member = ProcessMember(
                name,
                lambda: Assignment(name=name, job=job, common=common),
                graph.supervision,
                start=partial(Child.start, guard=guard, output=self.output),
                say=self._say,
            )
            try:
                async with asyncio.TaskGroup() as group:
                    running = group.create_task(member.run(), name=name)
                    try:
                        yield
                    except BaseException:
                        member.kill()
                        raise
                    member.stop()
                    await asyncio.wait({running}, timeout=worker_drain_s(graph) + _KILL_AFTER_S)
                    member.kill()
            except BaseExceptionGroup as errors:
                raise cause_of(errors) from None

    def _keep_record(self, directory: Path, follows: str) -> None:
        """Write the record by which commands find this node, and begin its log; raises ConfigError if the disk is full."""
        self.output.log = LogFile(directory / OUTPUT_LOG)
        record = DeploymentRecord(
            name=self.graph.name,
            pid=os.getpid(),
            started_s=wall_time_s(),
            stop_s_max=worker_drain_s(self.graph) + _KILL_AFTER_S,
            log=str(self.output.log.path),
            origin=self._origin,
            follows=follows,
        )
        keep_record(directory, record)

    def _say(self, name: str, state: str, detail: str) -> None:
        self.output.note(name, f"{state:<9} {detail}".rstrip())
        self._on_state(name, state, detail)

    def _waits_for(self) -> dict[str, str]:
        """Give the phase of each process that is not ready, for `/ready`."""
        if self._member is None:
            return {"penstock": "reads the model"}
        member = self._member
        return {} if member.ready.is_set() and not member.is_stopping else {member.name: member.phase}
