"""A workload on a model with a start-up time, and one run of a strategy on it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from benchmarks.planner.experiment import play
from benchmarks.planner.planned import ROLES, WITHOUT_FLIPS
from benchmarks.planner.strategies import make_strategy, workers_at_first
from benchmarks.planner.workload import Workload, alternating, diurnal, from_trace, growing, steady
from benchmarks.planner.world.fleets import SLOS, Model, find_model
from benchmarks.runner import Figures, fingerprint
from penstock.core.types.instances import Role
from penstock.planner.demand import SloTargets

AGGREGATED = (Role.AGGREGATED,)
DISAGGREGATED = (Role.PREFILL, Role.DECODE)
TIMELINE = "timeline "
_MADE: dict[str, Callable[..., Workload]] = {
    "alternating": alternating,
    "diurnal": diurnal,
    "growing": growing,
    "steady": steady,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the benchmark.

    load:      `trace`, or one of the made ones
    size:      copies of a trace's rows, or requests per second at the peak
    start_s:   seconds from adding a worker to its being ready
    span_s:    length of a made workload
    slo:       targets, if not those of the model
    roles:     roles that the baselines scale
    planners:  the planner's strategies; others are compared with the first
    """

    name: str
    load: str
    model: str
    size: float
    start_s: float
    trace: Path | None = None
    span_s: float = 86_400.0
    seed: int = 1
    slo: SloTargets | None = None
    roles: tuple[Role, ...] = AGGREGATED
    planners: tuple[str, ...] = ("planner",)

    @property
    def targets(self) -> SloTargets:
        """The targets of TTFT and ITL."""
        return self.slo or SLOS[self.model]

    @property
    def key(self) -> str:
        trace = "" if self.trace is None else f" {fingerprint(self.trace)}"
        slo = f"ttft={self.targets.ttft_s:g} itl={self.targets.itl_s:g}"
        return (
            f"{self.load}{trace} {self.model} {slo} size={self.size:g} start={self.start_s:g}"
            f" span={self.span_s:g} seed={self.seed}"
        )

    def workload(self) -> Workload:
        """Make the requests.

        Raises:
            ConfigError: the trace cannot be read.
        """
        return _workload(self.load, self.trace, self.size, self.span_s, self.seed)

    def make_model(self, examples: Path) -> Model:
        """Make the workers.

        Raises:
            ConfigError: a file cannot be read.
        """
        return find_model(self.model, examples, slo=self.targets)


@lru_cache(maxsize=2)
def _workload(load: str, trace: Path | None, size: float, span_s: float, seed: int) -> Workload:
    if load == "trace":
        assert trace is not None, "given with traces"
        return from_trace(trace, load, size, seed=seed)
    return _MADE[load](size, span_s=span_s, seed=seed)


@dataclass(frozen=True, slots=True)
class Play:
    """A job: one strategy on one case.

    setting: replicas of each role, if static; else the number that the strategy is tuned by, or none
    """

    case: Case
    strategy: str
    setting: tuple[float, ...]
    examples: Path

    @property
    def key(self) -> str:
        case = self.case if self.strategy != "static" else replace(self.case, start_s=0.0)
        setting = "+".join(f"{value:g}" for value in self.setting)
        roles = "+".join(self.roles)
        return f"{self.strategy} {roles} {setting} {case.key}"

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that the strategy scales."""
        return ROLES.get(self.strategy, self.case.roles)

    def __call__(self) -> Figures:
        """Run; the figures have the run's timeline too, unless it is static.

        Raises:
            ConfigError: a file cannot be read.
        """
        case, roles = self.case, self.roles
        model, load = case.make_model(self.examples), case.workload()
        if self.strategy == "static":
            replicas = {role: round(count) for role, count in zip(roles, self.setting, strict=True)}
        else:
            kind = AGGREGATED if Role.AGGREGATED in roles else DISAGGREGATED
            replicas = dict.fromkeys(roles, 0) | workers_at_first(load, model, kind, case.start_s)
        found = play(
            make_strategy(self.strategy, self.setting, load, model, roles),
            load,
            model.fleet,
            model.slo,
            replicas=replicas,
            start_s=case.start_s,
            can_flip=self.strategy != WITHOUT_FLIPS,
        )
        figures = {
            "attainment": found.attainment,
            "ttft_share": found.ttft_share,
            "itl_share": found.itl_share,
            "gpu_hours": found.gpu_hours,
            "failed": found.failed,
            "changes_per_hour": found.changes / (load.span_s / 3600),
            "flips": found.flips,
            "cached_share": found.cached_share,
            "ttft_p99_s": found.ttft_p99_s,
            "itl_p99_s": found.itl_p99_s,
            "requests": load.requests,
            "cpu_s": found.cpu_s,
        }
        if self.strategy != "static":
            for name, values in found.timeline.items():
                figures |= {f"{TIMELINE}{name} {at:04}": value for at, value in enumerate(values)}
        return figures
