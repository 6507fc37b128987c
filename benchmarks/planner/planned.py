"""Penstock's planner as a strategy."""

from dataclasses import dataclass, field

from benchmarks.planner.world.cluster import Cluster
from benchmarks.planner.world.fleets import Model
from penstock.core.types.instances import Role
from penstock.planner.config import PlannerConfig
from penstock.planner.demand import SloTargets
from penstock.planner.planner import Planner
from penstock.planner.record import DecisionRecord

WITHOUT_FLIPS = "planner-without-flips"
ROLES = {
    "planner": (Role.AGGREGATED,),
    "planner-disaggregated": (Role.PREFILL, Role.DECODE),
    WITHOUT_FLIPS: (Role.PREFILL, Role.DECODE),
    "planner-switching": (Role.AGGREGATED, Role.PREFILL, Role.DECODE),
}
"""By strategy: the roles that the planner may use."""


@dataclass
class Planned:
    """The planner with its defaults, on some roles.

    percentile: share of requests, in percent, that it aims to serve within the targets; None is the model's
    """

    model: Model
    roles: tuple[Role, ...] = (Role.AGGREGATED,)
    percentile: float | None = None
    workers_max: int = 40
    records: list[DecisionRecord] = field(default_factory=list)

    async def run(self, cluster: Cluster) -> None:
        slo = self.model.slo
        planner = Planner(
            cluster.connector,
            cluster.observe,
            config=PlannerConfig(max_workers=self.workers_max),
            slo=SloTargets(ttft_s=slo.ttft_s, itl_s=slo.itl_s, percentile=self.percentile or slo.percentile),
            capacities=[self.model.capacity(role) for role in self.roles],
            on_record=self._keep,
        )
        await planner.run()

    def _keep(self, record: DecisionRecord) -> None:
        if record.is_change:
            self.records.append(record)
