"""All strategies on one case; each baseline with the setting that holds the SLO for the fewest GPU-hours."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.planner.case import Case, Play, open_at_capacity, workers_at_mean, workers_at_peak
from benchmarks.planner.world.fleets import find_model
from benchmarks.runner.cache import Figures
from benchmarks.runner.runner import Runner
from penstock.core.errors import ConfigError

HELD = 0.99
"""Share of requests within both targets that a strategy has to reach."""
PEAK_HELD = 0.995
_PEAKS_MAX = 12
_SETTINGS = {
    "autoscaler": (0.35, 0.5, 0.7, 0.9, 1.2),
    "interpolation": (1.0, 1.2, 1.4, 1.7),
    "oracle": (0.9, 1.0, 1.1, 1.25),
}
"""By strategy: open requests per worker over those at capacity, or the known or last rate times this."""


@dataclass(frozen=True, slots=True)
class Found:
    """The figures of each strategy on a case, and of each setting that was tried."""

    case: Case
    chosen: dict[str, Figures] = field(default_factory=dict)
    tried: dict[str, list[tuple[float, Figures]]] = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        """Name the figures by case and strategy."""
        found: dict[str, float] = {}
        for strategy, own in self.chosen.items():
            place = f"{self.case.name}_{strategy.replace('-', '_')}"
            found |= {
                f"{place}_attainment": own["attainment"],
                f"{place}_gpu_hours": own["gpu_hours"],
                f"{place}_changes_per_hour": own["changes_per_hour"],
                f"{place}_failed": own["failed"],
            }
        planner = self.chosen["planner"]
        for other in ("static-peak", "autoscaler", "interpolation", "oracle"):
            name = f"{self.case.name}_gpu_hours_over_{other.replace('-', '_')}"
            found[name] = planner["gpu_hours"] / self.chosen[other]["gpu_hours"]
        return found


def compare(case: Case, runner: Runner, examples: Path, strategies: Iterable[str]) -> Found:
    """Run every strategy.

    Raises:
        ConfigError: a file cannot be read, or no number of static workers holds the SLO.
    """
    model, load = find_model(case.model, examples), case.workload()
    found = Found(case)
    peak, own = _static_peak(case, runner, examples, workers_at_peak(load, model))
    found.chosen["static-peak"] = own | {"setting": peak}
    crowd = open_at_capacity(load, model)
    mean = workers_at_mean(load, model)
    jobs = [Play(case, "static", mean, examples)]
    jobs += [Play(case, strategy, 0.0, examples) for strategy in strategies]
    for name, settings in _SETTINGS.items():
        unit = crowd if name == "autoscaler" else 1.0
        jobs += [Play(case, name, round(unit * setting, 3), examples) for setting in settings]
    for job, figures in runner.run_many(jobs):
        name = "static-mean" if job.strategy == "static" else job.strategy
        found.tried.setdefault(name, []).append((job.setting, figures))
    for name, tried in found.tried.items():
        setting, own = best(tried)
        found.chosen[name] = own | {"setting": setting}
    return found


def best(tried: list[tuple[float, Figures]]) -> tuple[float, Figures]:
    """Give the fewest GPU-hours of those that hold the SLO, else the one that comes nearest to it."""
    return min(tried, key=lambda one: _rank(one[1]))


def _rank(figures: Figures) -> tuple[bool, float]:
    held = figures["attainment"] >= HELD
    return not held, figures["gpu_hours"] if held else -figures["attainment"]


def _static_peak(case: Case, runner: Runner, examples: Path, guess: int) -> tuple[int, Figures]:
    """Find the fewest static workers that hold the SLO for 99.5 % of the requests."""
    known: dict[int, Figures] = {}

    def holds(workers: int) -> bool:
        known[workers] = runner.run(Play(case, "static", workers, examples))
        return known[workers]["attainment"] >= PEAK_HELD

    count = guess
    while not holds(count):
        count += 1
        if count > guess + _PEAKS_MAX:
            raise ConfigError(
                f"{case.name}: {count} workers hold the SLO for {known[count - 1]['attainment']:.1%} of the requests,"
                f" expected {PEAK_HELD:.1%}; its latency targets are out of reach"
            )
    while count > 1 and (count - 1) not in known and holds(count - 1):
        count -= 1
    return count, known[count]
