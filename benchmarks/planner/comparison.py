"""All strategies on one case; each baseline with the setting that holds the SLO for the fewest GPU-hours."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.planner.case import TIMELINE, Case, Play
from benchmarks.planner.planned import WITHOUT_FLIPS
from benchmarks.planner.strategies import workers_at_mean, workers_at_peak
from benchmarks.runner import Figures, Runner
from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role

HELD = 0.99
"""Share of requests within both targets that a strategy has to reach."""
PEAK_HELD = 0.995
_PEAKS_MAX = 24
_AUTOSCALER = (1.0, 0.6, 0.4, 0.25)
"""Open requests per worker over those at capacity. All are run: what a setting holds does not grow with what it costs."""
BASELINES = ("autoscaler", "interpolation", "oracle")
"""Those that can be left out."""
_SETTINGS = {
    "interpolation": (0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0),
    "oracle": (0.9, 1.0, 1.1, 1.25, 1.4, 1.6, 2.0),
}
"""By strategy, the cheapest first: the known or last rate times this."""
_PERCENTILES = (98.0, 99.0, 99.5, 99.9)
"""What the planner without flips aims at, for as much as it attains with them; all are run."""
_SAME = 0.0005
"""Shares within both targets are the same up to this."""
Setting = tuple[float, ...]
Tried = list[tuple[Setting, Figures]]


@dataclass(frozen=True, slots=True)
class Found:
    """The figures of each strategy on a case, and of each setting that was tried."""

    case: Case
    chosen: dict[str, Figures] = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)
    tried: dict[str, Tried] = field(default_factory=dict)

    def choose(self, name: str, setting: Setting, own: Figures) -> None:
        self.settings[name] = setting
        self.chosen[name] = {key: value for key, value in own.items() if not key.startswith(TIMELINE)}

    def figures(self) -> dict[str, float]:
        """Name the figures by case and strategy."""
        found: dict[str, float] = {}
        for strategy, own in self.chosen.items():
            place = f"{self.case.name}_{strategy.replace('-', '_')}"
            found |= {
                f"{place}_{name}": own[name]
                for name in ("attainment", "gpu_hours", "changes_per_hour", "failed", "flips", "cached_share")
            }
        planner = self.chosen[self.case.planners[0]]
        for other, own in self.chosen.items():
            if other != self.case.planners[0]:
                name = f"{self.case.name}_gpu_hours_over_{other.replace('-', '_')}"
                found[name] = planner["gpu_hours"] / own["gpu_hours"]
        return found

    def timelines(self) -> dict[str, list[float]]:
        """Name what was over time, by case, strategy and series, of the planner's strategies and the oracle."""
        found: dict[str, list[float]] = {}
        for strategy in (*self.case.planners, "oracle"):
            if strategy not in self.chosen:
                continue
            of = dict(self.tried[strategy])[self.settings[strategy]]
            for name in sorted(of):
                if name.startswith(TIMELINE):
                    series = name.removeprefix(TIMELINE).rsplit(" ", 1)[0]
                    found.setdefault(f"{self.case.name} {strategy} over time {series}", []).append(of[name])
        return found


def compare(case: Case, runner: Runner, examples: Path, leave_out: Collection[str] = ()) -> Found:
    """Run every strategy, but some baselines.

    Raises:
        ConfigError: a file cannot be read, or no number of static workers holds the SLO.
    """
    model, load = case.make_model(examples), case.workload()
    found = Found(case)
    peak, own = _static_peak(case, runner, examples, workers_at_peak(load, model, case.roles))
    found.choose("static-peak", peak, own)
    mean = tuple(float(count) for count in workers_at_mean(load, model, case.roles).values())
    jobs = [Play(case, "static", mean, examples)]
    jobs += [Play(case, name, (), examples) for name in case.planners if name != WITHOUT_FLIPS]
    if "autoscaler" not in leave_out:
        jobs += [Play(case, "autoscaler", (setting,), examples) for setting in _AUTOSCALER]
    for job, figures in runner.run_many(jobs):
        name = "static-mean" if job.strategy == "static" else job.strategy
        found.tried.setdefault(name, []).append((job.setting, figures))
    for name, tried in found.tried.items():
        found.choose(name, *best(tried))
    searched = [name for name in _SETTINGS if name not in leave_out]
    _search(found, dict.fromkeys(searched, HELD), _SETTINGS, runner, examples)
    if WITHOUT_FLIPS in case.planners:
        as_much = found.chosen["planner-disaggregated"]["attainment"] - _SAME
        jobs = [Play(case, WITHOUT_FLIPS, (percentile,), examples) for percentile in _PERCENTILES]
        tried = found.tried[WITHOUT_FLIPS] = [(job.setting, own) for job, own in runner.run_many(jobs)]
        found.choose(WITHOUT_FLIPS, *best(tried, as_much))
    return found


def _search(
    found: Found,
    held: dict[str, float],
    settings: dict[str, tuple[float, ...]],
    runner: Runner,
    examples: Path,
) -> None:
    """Find the cheapest setting of each strategy that holds its share, by bisection, and try one between it and the next cheaper."""
    bounds = {name: (0, len(settings[name])) for name in held}
    while any(low < high for low, high in bounds.values()):
        jobs = [
            Play(found.case, name, (settings[name][(low + high) // 2],), examples)
            for name, (low, high) in bounds.items()
            if low < high
        ]
        for job, figures in runner.run_many(jobs):
            name, (low, high) = job.strategy, bounds[job.strategy]
            middle = (low + high) // 2
            found.tried.setdefault(name, []).append((job.setting, figures))
            bounds[name] = (low, middle) if figures["attainment"] >= held[name] else (middle + 1, high)
    between = [
        Play(found.case, name, (round(math.sqrt(own[at - 1] * own[at]), 4),), examples)
        for name, (at, _) in bounds.items()
        if 0 < at < len(own := settings[name])
    ]
    for job, figures in runner.run_many(between):
        found.tried[job.strategy].append((job.setting, figures))
    for name, share in held.items():
        setting, figures = best(found.tried[name], share)
        found.choose(name, setting, figures)


def best(tried: Tried, held: float = HELD) -> tuple[Setting, Figures]:
    """Give the fewest GPU-hours of those that hold the SLO, else the one that comes nearest to it."""

    def rank(one: tuple[Setting, Figures]) -> tuple[bool, float]:
        figures = one[1]
        is_held = figures["attainment"] >= held
        return not is_held, figures["gpu_hours"] if is_held else -figures["attainment"]

    return min(tried, key=rank)


def _static_peak(
    case: Case, runner: Runner, examples: Path, guess: dict[Role, int]
) -> tuple[Setting, Figures]:
    """Find the fewest static workers that hold the SLO for 99.5 % of the requests; of several roles, none can be left out."""
    known: dict[Setting, Figures] = {}

    def figures(counts: Sequence[float]) -> Figures:
        key = tuple(counts)
        if key not in known:
            known[key] = runner.run(Play(case, "static", key, examples))
        return known[key]

    def holds(counts: Sequence[float]) -> bool:
        return figures(counts)["attainment"] >= PEAK_HELD

    counts = [float(count) for count in guess.values()]
    for _ in range(_PEAKS_MAX):
        if holds(counts):
            break
        own = figures(counts)
        # The first of two roles is prefill.
        counts[0 if len(counts) == 1 or own["ttft_share"] < own["itl_share"] else 1] += 1
    else:
        raise ConfigError(
            f"{case.name}: {sum(counts):.0f} workers hold the SLO for {figures(counts)['attainment']:.1%} of the"
            f" requests, expected {PEAK_HELD:.1%}; its latency targets are out of reach"
        )
    fewer = True
    while fewer:
        fewer = False
        for at, count in enumerate(counts):
            less = [*counts[:at], count - 1, *counts[at + 1 :]]
            if count > 1 and holds(less):
                counts, fewer = less, True
    return tuple(counts), figures(counts)
