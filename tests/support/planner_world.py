"""A deployment in memory with a demand that tests set: what a planner sees and what it does."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.core.types.instances import ReplicaState, Role
from penstock.perf.hardware import find_hardware
from penstock.perf.model_config import find_shape
from penstock.perf.roofline import Roofline
from penstock.planner.capacity import Capacity
from penstock.planner.config import PlannerConfig
from penstock.planner.demand import ExpectedDemand, SloTargets
from penstock.planner.memory_connector import MemoryConnector, ReplicaChanges, TimedChanges
from penstock.planner.observation import Observation, ObservedDemand, ObservedWorker
from penstock.planner.planner import Planner
from penstock.planner.policy import Policy
from penstock.runtime.observations import Digest, bucket_of

if TYPE_CHECKING:
    from penstock.planner.record import DecisionRecord

MODEL = Roofline(find_shape("llama-3.1-8b"), find_hardware("h100"))
TOKENS = {Role.AGGREGATED: 512, Role.PREFILL: 8192, Role.DECODE: 512}
SLO = SloTargets(ttft_s=0.5, itl_s=0.025)


def digest(value: float, count: float) -> Digest:
    number = round(count)
    return (
        Digest(count=number, total=value * number, buckets={bucket_of(value): number}) if number else Digest()
    )


class World:
    """Requests of 2,000 and 200 tokens at `rate_per_s`; a planner looks at it and scales it."""

    def __init__(
        self,
        replicas: Mapping[Role, int],
        *,
        start_s: float = 20.0,
        changes: ReplicaChanges | None = None,
        workers_max: int = 64,
        slo: SloTargets = SLO,
        policy: type[Policy] = Policy,
        **settings: Any,
    ) -> None:
        self.connector = MemoryConnector(
            replicas, workers_max=workers_max, changes=changes or TimedChanges(starts_s=start_s)
        )
        self.rate_per_s = 0.0
        self.input_tokens, self.output_tokens = 2000, 200
        self.queued = 0
        self.ttft_s, self.itl_s = 0.1, 0.01
        self.frontends: tuple[str, ...] = ("frontend-1",)
        self.records: list[DecisionRecord] = []
        self.capacities = [
            Capacity(role=role, model=MODEL, max_batch_tokens=TOKENS[role]) for role in replicas
        ]
        config = PlannerConfig(**settings)
        self.planner = Planner(
            self.connector,
            self.observe,
            config=config,
            policy=policy(config, slo, self.capacities),
            slo=slo,
            capacities=self.capacities,
            on_record=self.records.append,
        )

    async def observe(self, seconds: float) -> Observation:
        scale = await self.connector.scale()
        count = self.rate_per_s * seconds
        views = tuple(
            ObservedWorker(replica.name, replica.role, replica.age_s, Digest(), 0, 0, 0, 0, 0, 0, 0, 0)
            for replica in scale.replicas
            if replica.state is ReplicaState.READY
        )
        demand = ObservedDemand(
            arrivals_per_s=self.rate_per_s,
            finished_per_s=self.rate_per_s,
            input_tokens=digest(self.input_tokens, count),
            output_tokens=digest(self.output_tokens, count),
            ttft_s=digest(self.ttft_s, count),
            itl_s=digest(self.itl_s, count),
            queued=self.queued,
        )
        return Observation(at_s=0.0, seconds=seconds, demand=demand, frontends=self.frontends, workers=views)

    def needed(self, rate_per_s: float, role: Role = Role.AGGREGATED) -> int | None:
        """Count the workers that hold the SLO."""
        expected = ExpectedDemand(rate_per_s=rate_per_s, input_tokens=2000, output_tokens=200)
        capacity = next(each for each in self.capacities if each.role is role)
        return capacity.workers(rate_per_s, expected, SLO, 64)

    async def counts(self) -> dict[Role, int]:
        scale = await self.connector.scale()
        return {limit.role: len(scale.of(limit.role)) for limit in scale.limits}
