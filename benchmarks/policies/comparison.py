"""Finds each deployment's saturation, then runs every cell with every policy and seed."""

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from benchmarks.policies.cells import TROUBLES, Cell, Effort
from benchmarks.runner import RECORDED, Description, Figures, Run, Runner, Trouble, Workload, find_graph
from penstock.core.errors import ConfigError
from penstock.plan.largest_rate import largest_rate

SUSTAINED = 0.98
"""A policy sustains a rate if it serves this part of the requests, `served_share` in the run's figures."""
_STEP = 1.3
_RANGE = _STEP**41.5
"""Saturation is searched between the guess divided by this and the guess times this."""


@dataclass(slots=True)
class Results:
    """Figures of runs by cell, policy and seed; of workloads, and saturation, by the cell's workload and deployment."""

    runs: dict[tuple[Cell, str, int], Figures] = field(default_factory=dict)
    workloads: dict[tuple[str, str], Figures] = field(default_factory=dict)
    saturation_rps: dict[tuple[str, str], float] = field(default_factory=dict)


class Progress:
    """One line on stderr for each run that ends, with an estimate of the time left. Threads share it."""

    def __init__(self) -> None:
        self._planned = self._done = 0
        self._began_s: float | None = None
        self._lock = threading.Lock()

    def plan(self, requests: int) -> None:
        self._planned += requests

    def start(self) -> None:
        """Measure from here, the first time."""
        self._began_s = self._began_s or perf_counter()

    def advance(self, requests: int, text: str, *, is_known: bool) -> None:
        """Count a run; a known one took no time."""
        with self._lock:
            if is_known:
                self._planned -= requests
                return
            self._done += requests
            assert self._began_s is not None, "started before"
            left_s = (perf_counter() - self._began_s) * (self._planned - self._done) / self._done
            minutes, seconds = divmod(round(left_s), 60)
            self.tell(f"{text} ({100 * self._done / self._planned:.0f} %, {minutes}:{seconds:02d} left)")

    def tell(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


@dataclass(slots=True)
class Comparison:
    """`policies` gives values of `router.policy` by name; `settings` override those of every graph."""

    examples: Path
    trace: Path | None
    policies: dict[str, str]
    effort: Effort
    runner: Runner
    settings: tuple[str, ...] = ()
    results: Results = field(default_factory=Results)
    _progress: Progress = field(default_factory=Progress)

    def run(self, cells: Sequence[Cell]) -> Results:
        """Run the cells; deployments and workloads beside each other.

        Raises:
            PenstockError: a run failed.
        """
        groups: dict[tuple[str, str], list[Cell]] = {}
        for cell in cells:
            groups.setdefault((cell.workload, cell.deployment), []).append(cell)
            requests, seeds = self.effort.of(cell)
            self._progress.plan(requests * len(seeds) * len(self.policies))
        # The runner ends first, so that no thread waits for its processes after an error or Ctrl-C.
        with ThreadPoolExecutor(len(groups)) as threads, self.runner:
            for group in as_completed([threads.submit(self._run_group, mine) for mine in groups.values()]):
                group.result()
        return self.results

    def _run_group(self, cells: Sequence[Cell]) -> None:
        workload, deployment = place = cells[0].workload, cells[0].deployment
        graph = find_graph(self.examples, deployment, self.settings)
        described = Description(graph, self._workload(workload, self.effort.requests))
        self.results.workloads[place] = about = self.runner.run(described)
        saturation_rps = self.effort.saturation_rps.get("/".join(place))
        if saturation_rps is None:
            saturation_rps = about["guess_rps"]
            if self.effort.tolerance is not None:
                saturation_rps = self._search(described, saturation_rps, self.effort.tolerance)
        self.results.saturation_rps[place] = saturation_rps
        self._progress.start()
        runs: dict[Run, tuple[Cell, str]] = {}
        for cell in cells:
            requests, seeds = self.effort.of(cell)
            trouble = Trouble() if cell.trouble is None else TROUBLES[cell.trouble]
            rate_per_s = saturation_rps * cell.load / 100
            for seed in seeds:
                for name, policy in self.policies.items():
                    run = Run(graph, self._workload(workload, requests), rate_per_s, policy, seed, trouble)
                    runs[run] = cell, name
        known = {run for run in runs if self.runner.knows(run)}
        for run, found in self.runner.run_many(runs):
            cell, name = runs[run]
            self.results.runs[cell, name, run.seed] = found
            text = f"{cell.name} seed {run.seed} {name}: mean TTFT {found['ttft_mean_s']:.3f} s"
            self._progress.advance(run.workload.requests, text, is_known=run in known)

    def _search(self, described: Description, guess_rps: float, tolerance: float) -> float:
        """Find the saturation of the best policy; the policy that sustained the last rate is tried first at the next."""
        order = list(self.policies)

        def is_sustained(rate_per_s: float) -> bool:
            self._progress.tell(f"{described.name}: is {rate_per_s:.3g} requests/s sustained?")
            for names in (order[:1], order[1:]):
                runs = [
                    Run(described.graph, described.workload, rate_per_s, self.policies[name], described.seed)
                    for name in names
                ]
                found = dict(self.runner.run_many(runs))
                for name, run in zip(names, runs, strict=True):
                    if found[run]["served_share"] >= SUSTAINED:
                        order.remove(name)
                        order.insert(0, name)
                        return True
            return False

        return find_saturation(is_sustained, guess_rps, tolerance=tolerance)

    def _workload(self, name: str, requests: int) -> Workload:
        return Workload(name, requests, self.trace if name == RECORDED else None)


def find_saturation(is_sustained: Callable[[float], bool], guess_rps: float, *, tolerance: float) -> float:
    """Search the largest rate that is sustained, to a relative `tolerance`.

    Raises:
        ConfigError: every rate or no rate within `_RANGE` of the guess is sustained.
    """
    least, most = guess_rps / _RANGE, guess_rps * _RANGE
    low, high = largest_rate(
        is_sustained, guess_rps, step=_STEP, precision=tolerance, least_per_s=least, most_per_s=most
    )
    if not low:
        raise ConfigError(f"no rate down to {high:g} requests/s is sustained; the workload is too short")
    if high > most:
        raise ConfigError(f"every rate up to {low:g} requests/s is sustained; the workload is too short")
    return low
