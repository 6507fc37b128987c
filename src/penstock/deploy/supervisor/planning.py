"""Makes the planner of a deployment on this machine."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock import __version__
from penstock.core.clock import wall_time_s
from penstock.core.types.instances import Location, Role
from penstock.deploy.hosts.connector import HostsConnector
from penstock.deploy.hosts.host_link import HostLink
from penstock.deploy.hosts.kubernetes_connector import KubernetesConnector
from penstock.deploy.hosts.planner_server import PlannerServer
from penstock.deploy.identity import location_here
from penstock.deploy.messages import ProcessSettings, RoundCounts
from penstock.deploy.supervisor.frontends import FrontendProcesses
from penstock.deploy.supervisor.worker_pool import LocalWorkerPool
from penstock.graph import Graph, RoleSpec, Slo
from penstock.graph.capacities import is_predicted, make_capacity
from penstock.planner.capacity import Capacity
from penstock.planner.decision_log import DecisionLog, LoggedRun
from penstock.planner.demand import SloTargets
from penstock.planner.observation import Observation, ObservationStream
from penstock.planner.planner import Planner
from penstock.planner.record import DecisionRecord
from penstock.runtime.handshake import Identity
from penstock.runtime.kubernetes import KubernetesAccess, KubernetesClient
from penstock.runtime.observations import Window
from penstock.runtime.tls import PlaneTls
from penstock.seams import ScalingConnector

Say = Callable[[str, str, str], None]
_NAME = "planner"


class Planning:
    """A planner with its log and metrics. Its context ends the log."""

    def __init__(
        self, log_path: Path, run: LoggedRun, *, say: Say, tell: Callable[[RoundCounts], None]
    ) -> None:
        """Keep nothing yet; set `planner` before it runs.

        Args:
            log_path: file of the decisions.
            run: the log's first line.
            say: called with (name, state, detail) at changes.
            tell: called with each round.
        """
        self.planner: Planner
        self._log: DecisionLog
        self._make_log = partial(DecisionLog, log_path, run)
        self._say, self._tell = say, tell
        self._record: DecisionRecord | None = None
        self._said: dict[Role, int] | None = None
        """Workers aimed at by the last round, if it changed something."""
        self._lost = 0

    def __enter__(self) -> Self:
        self._log = self._make_log()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()

    async def run(self) -> None:
        """Run the planner until cancelled."""
        await self.planner.run()

    def take(self, record: DecisionRecord) -> None:
        """Print a round's changes and keep the round. A dry run prints the same change once, as it comes again each round."""
        is_said = record.is_dry and record.target == self._said
        self._said = dict(record.target) if record.is_change else None
        if record.is_change and not is_said:
            self._say(_NAME, "would" if record.is_dry else "scales", record.explain().removeprefix("would: "))
        self._log.put(record)
        self._record = record

    def end(self, seconds: float, error: str) -> None:
        """Tell a frontend of a round that has ended, or failed."""
        lost, self._lost = self._log.lost - self._lost, self._log.lost
        record = self._record
        if error or record is None:
            self._tell(RoundCounts(outcome="failed", seconds=seconds, lost=lost))
            return
        seen = record.seen.roles
        self._tell(
            RoundCounts(
                outcome=record.outcome,
                seconds=seconds,
                have=record.now,
                wanted=record.target,
                changes=_changes(record),
                expected=record.expected,
                has_shortfall=record.decision is not None and bool(record.decision.shortfall),
                lost=lost,
                gpu_watts={each.role: each.gpu_watts for each in seen if each.gpu_watts is not None},
                gpu_utilization={
                    each.role: each.gpu_utilization for each in seen if each.gpu_utilization is not None
                },
            )
        )


def make_planning(
    graph: Graph,
    roles: dict[Role, RoleSpec],
    connector: ScalingConnector,
    observations: ObservationStream,
    *,
    model_dir: Path,
    log_path: Path,
    say: Say,
    tell: Callable[[RoundCounts], None],
) -> Planning | None:
    """Make the planner that the graph describes; None without a planner in the graph.

    Args:
        graph: the deployment.
        roles: its roles.
        connector: changes its workers.
        observations: what its processes see.
        model_dir: the checkpoint's directory.
        log_path: file of its decisions.
        say: called with (name, state, detail) for what a user should know.
        tell: called with each round.

    Raises:
        ConfigError: step times of a role cannot be predicted.
    """
    config = graph.planner
    if config is None:
        return None
    capacities = capacities_of(graph, roles, model_dir)
    slo = graph.slo or Slo()
    bounds = ", ".join(
        f"{least} to {most} {role}" for role in roles for least, most in (config.bounds(role),)
    )
    dry = ", dry run" if config.act.dry_run else ""
    say(
        _NAME,
        "starting",
        f"{bounds} for TTFT {slo.ttft_s * 1e3:g} ms and ITL {slo.itl_s * 1e3:g} ms of {slo.percentile:g} % of requests{dry}",
    )
    for role, spec in roles.items():
        if is_predicted(spec):
            say(
                _NAME,
                "warning",
                f"roles.{role} has no profile: step times are predicted from the data sheet of {spec.hardware} and corrected by"
                " measured ones; penstock profile measures them",
            )

    run = LoggedRun(
        time_s=wall_time_s(),
        version=__version__,
        graph=graph.model_dump(mode="json", exclude_unset=True),
        model_dir=str(model_dir.resolve()),
    )
    planning = Planning(log_path, run, say=say, tell=tell)

    async def observe(seconds: float) -> Observation:
        return observations.observe(seconds)

    planning.planner = Planner(
        connector,
        observe,
        config=config,
        slo=SloTargets(ttft_s=slo.ttft_s, itl_s=slo.itl_s, percentile=slo.percentile),
        capacities=capacities,
        on_record=planning.take,
        on_round=planning.end,
    )
    return planning


def capacities_of(graph: Graph, roles: dict[Role, RoleSpec], model_dir: Path) -> list[Capacity]:
    """Give what one worker of each role can do, for the planner of the graph.

    Raises:
        ConfigError: step times of a role cannot be predicted.
    """
    budget = graph.planner.budget if graph.planner else None
    return [
        make_capacity(role, spec, model_dir=model_dir, block_size=graph.block_size, budget=budget)
        for role, spec in roles.items()
    ]


def _changes(record: DecisionRecord) -> dict[str, int]:
    """Count the workers that the round began to change, refused ones included."""
    counts = {
        "flip": len(record.flips),
        "add": sum(record.adds.values()),
        "retire": len(record.retires),
    }
    return {change: count for change, count in counts.items() if count and not record.is_dry}


_CALL_S = 10.0
"""Longest call of the API of Kubernetes."""


@dataclass(slots=True)
class PlannerPlace:
    """What a host's planner scales and sees, and where this host's windows go beside its own stream.

    Attributes:
        connector: changes the workers of all hosts that the planner scales.
        observations: what their processes see.
    """

    connector: ScalingConnector
    observations: ObservationStream
    _frontends: FrontendProcesses
    _host: str = ""
    _server: PlannerServer | None = None
    _link: HostLink | None = None

    def window(self, process: str, window: Window) -> None:
        """Take a window of a process of this host."""
        if self._link is not None:
            self._link.window(process, window)
        elif self._server is not None:
            self.observations.put(f"{process}@{self._host}", window)

    def expect(self, process: str) -> None:
        """Note that a process of this host is ready."""
        if self._server is not None:
            self.observations.expect(f"{process}@{self._host}")

    def forget(self, process: str) -> None:
        """Note that a process of this host has ended for good."""
        if self._server is not None:
            self.observations.forget(f"{process}@{self._host}")

    def tell(self, planned: RoundCounts) -> None:
        """Send a round to one frontend, of this host if it has any."""
        if self._server is None:
            self._frontends.tell_planned(planned)
        elif self._frontends.count:
            self._frontends.tell_planned(self._server.with_refused(planned))
        else:
            self._server.tell(planned)


@asynccontextmanager
async def planner_place(
    graph: Graph,
    common: ProcessSettings,
    pool: LocalWorkerPool,
    frontends: FrontendProcesses,
    observations: ObservationStream,
    *,
    has_planner: bool,
) -> AsyncIterator[PlannerPlace]:
    """Listen for other hosts where the planner of several is here, or connect to it where it is elsewhere.

    Raises:
        ConfigError: its address is in use, or not of this host.
    """
    config = graph.planner
    if config is None or config.address is None:
        yield PlannerPlace(pool, observations, frontends)
        return
    identity = Identity(process="supervisor", hash_key=common.hash_key, secret=common.secret)
    name = location_here(Location()).host
    async with AsyncExitStack() as stack:
        tls = PlaneTls.of(graph.runtime.tls)
        if tls is not None:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(group.create_task(tls.watch(), name="certificates").cancel)
        if has_planner:
            seen = ObservationStream()
            connector: HostsConnector | KubernetesConnector
            if config.scales == "pods":
                access = KubernetesAccess.find()
                client = await stack.enter_async_context(KubernetesClient(access, timeout_s=_CALL_S))
                connector = KubernetesConnector(client, graph.name, graph.roles.present())
            else:
                connector = HostsConnector(hold_s=config.act.hold_s)
                connector.join(name, pool, await pool.scale())
            server = await stack.enter_async_context(
                PlannerServer(config.address, identity, connector, seen, tls=tls, own_name=name)
            )
            yield PlannerPlace(connector, seen, frontends, name, server)
            return
        link = HostLink(
            config.address,
            identity,
            name=name,
            host=pool,
            frontends=frontends.ready,
            tell=frontends.tell_planned,
            rng=random.Random(),
            tls=tls,
        )
        yield PlannerPlace(pool, observations, frontends, name, None, await stack.enter_async_context(link))
