"""Penstock's planner as a strategy."""

from dataclasses import dataclass, field

from benchmarks.planner.world.cluster import Cluster
from benchmarks.planner.world.fleets import Model
from penstock.core.types.instances import Role
from penstock.planner.config import PlannerConfig
from penstock.planner.explain.record import DecisionRecord
from penstock.planner.planner import Planner

ROLES = {
    "planner": (Role.AGGREGATED,),
    "planner-disaggregated": (Role.PREFILL, Role.DECODE),
    "planner-switching": (Role.AGGREGATED, Role.PREFILL, Role.DECODE),
}
"""By strategy: the roles that the planner may use."""


@dataclass
class Planned:
    """The planner with its defaults, on the roles of `kind`."""

    model: Model
    kind: str
    workers_max: int = 40
    records: list[DecisionRecord] = field(default_factory=list)

    def replicas(self, workers: int) -> dict[Role, int]:
        """Give the workers in the beginning, of `workers` aggregated ones."""
        roles = ROLES[self.kind]
        if Role.AGGREGATED in roles:
            return dict.fromkeys(roles, 0) | {Role.AGGREGATED: workers}
        half = max(1, workers // 2)
        return {Role.PREFILL: half, Role.DECODE: max(1, workers - half)}

    async def run(self, cluster: Cluster) -> None:
        planner = Planner(
            cluster.connector,
            cluster.observe,
            config=PlannerConfig(max_workers=self.workers_max),
            slo=self.model.slo,
            capacities=[self.model.capacity(role) for role in ROLES[self.kind]],
            on_record=self._keep,
        )
        await planner.run()

    def _keep(self, record: DecisionRecord) -> None:
        if record.is_change:
            self.records.append(record)
