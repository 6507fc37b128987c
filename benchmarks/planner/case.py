"""A workload on a model with a start-up time, and one run of a strategy on it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from benchmarks.planner.baselines import (
    Autoscaler,
    Interpolation,
    Oracle,
    Static,
    Strategy,
    expect,
    needed,
)
from benchmarks.planner.experiment import play
from benchmarks.planner.planned import Planned
from benchmarks.planner.workload import Workload, diurnal, from_trace, growing, steady
from benchmarks.planner.world.fleets import Model, find_model
from benchmarks.runner.cache import Figures
from benchmarks.runner.run import fingerprint
from penstock.core.types.instances import Role

WORKERS_MAX = 40
_PEAK_BIN_S = 30.0
_MADE: dict[str, Callable[..., Workload]] = {"diurnal": diurnal, "growing": growing, "steady": steady}


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the benchmark.

    load:       `trace`, `diurnal`, `growing` or `steady`
    size:       copies of a trace's rows, or requests per second at the peak
    start_s:    seconds from adding a worker to its being ready
    span_s:     length of a made workload
    """

    name: str
    load: str
    model: str
    size: float
    start_s: float
    trace: Path | None = None
    span_s: float = 86_400.0
    seed: int = 1

    @property
    def key(self) -> str:
        trace = "" if self.trace is None else f" {fingerprint(self.trace)}"
        return f"{self.load}{trace} {self.model} size={self.size:g} start={self.start_s:g} span={self.span_s:g} seed={self.seed}"

    def workload(self) -> Workload:
        """Make the requests.

        Raises:
            ConfigError: the trace cannot be read.
        """
        return _workload(self)


@lru_cache(maxsize=2)
def _workload(case: Case) -> Workload:
    if case.load == "trace":
        assert case.trace is not None, "given with traces"
        return from_trace(case.trace, case.name, case.size, seed=case.seed)
    return _MADE[case.load](case.size, span_s=case.span_s, seed=case.seed)


@dataclass(frozen=True, slots=True)
class Play:
    """A job: one strategy on one case. `setting` is the number that the strategy is tuned by."""

    case: Case
    strategy: str
    setting: float
    examples: Path

    @property
    def key(self) -> str:
        return f"{self.strategy} {self.setting:g} {self.case.key}"

    def __call__(self) -> Figures:
        """Run.

        Raises:
            ConfigError: a file cannot be read.
        """
        model = find_model(self.case.model, self.examples)
        load = self.case.workload()
        strategy = _strategy(self.strategy, self.setting, load, model)
        first = _at_first(load, model)
        replicas = {Role.AGGREGATED: first}
        if self.strategy == "static":
            replicas = {Role.AGGREGATED: round(self.setting)}
        if isinstance(strategy, Planned):
            replicas = strategy.replicas(first)
        found = play(strategy, load, model.fleet, model.slo, replicas=replicas, start_s=self.case.start_s)
        return {
            "attainment": found.attainment,
            "ttft_share": found.ttft_share,
            "itl_share": found.itl_share,
            "gpu_hours": found.gpu_hours,
            "failed": found.failed,
            "changes_per_hour": found.changes / (load.span_s / 3600),
            "flips": found.flips,
            "ttft_p99_s": found.ttft_p99_s,
            "itl_p99_s": found.itl_p99_s,
            "requests": load.requests,
            "cpu_s": found.cpu_s,
        }


def _strategy(name: str, setting: float, load: Workload, model: Model) -> Strategy:
    capacity = model.capacity(Role.AGGREGATED)
    if name == "static":
        return Static()
    if name == "autoscaler":
        return Autoscaler(setting)
    if name == "interpolation":
        return Interpolation(capacity, model.slo, setting)
    if name == "oracle":
        return Oracle(needed(load, capacity, model.slo, WORKERS_MAX, setting))
    return Planned(model, name)


def workers_at_peak(load: Workload, model: Model) -> int:
    """Guess the workers that the busiest 30 s need."""
    counts = np.histogram(load.at_s, bins=max(1, int(load.span_s / _PEAK_BIN_S)))[0]
    return _workers(load, model, float(counts.max()) / _PEAK_BIN_S)


def workers_at_mean(load: Workload, model: Model) -> int:
    """Guess the workers that the mean rate needs."""
    return _workers(load, model, load.requests / load.span_s)


def open_at_capacity(load: Workload, model: Model) -> float:
    """Guess the open requests of a worker at its largest rate within the SLO."""
    expected = expect(load.input_tokens, load.output_tokens, 1.0)
    rate_per_s = model.capacity(Role.AGGREGATED).rate_per_s(1, expected, model.slo)
    return max(1.0, rate_per_s * expected.output_tokens * 0.6 * model.slo.itl_s)


def _at_first(load: Workload, model: Model) -> int:
    """Give every strategy the workers that the first minute needs, and a quarter more."""
    rate_per_s = float((load.at_s < 60).sum()) / 60
    return math.ceil(1.25 * _workers(load, model, rate_per_s))


def _workers(load: Workload, model: Model, rate_per_s: float) -> int:
    expected = expect(load.input_tokens, load.output_tokens, rate_per_s)
    capacity = model.capacity(Role.AGGREGATED)
    return capacity.workers(rate_per_s, expected, model.slo, WORKERS_MAX) or WORKERS_MAX
