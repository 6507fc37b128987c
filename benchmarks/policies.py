"""Routing policies side by side, on the simulator: `kv` against the baselines under `benchmarks/baselines`."""

import argparse
import html
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from benchmarks.baselines import ABLATIONS, BASELINES
from benchmarks.runner import (
    DEPLOYMENTS,
    RECORDED,
    SYNTHETIC,
    Cache,
    Description,
    Figures,
    Run,
    Runner,
    Trouble,
    Workload,
    add_simulations,
    expect_at_least,
    find_graph,
)
from penstock.bench.report import BenchReport
from penstock.core.errors import ConfigError
from penstock.plan.trial import largest_rate
from penstock.router.policies import POLICIES, SessionAffinity, make_policy
from penstock.sim.trace import read_trace

LOADS = (30, 60, 80, 95, 110)
"""In per cent of saturation."""
OVERLOAD = 110
HEADLINE = (SYNTHETIC, "70b-fp8", 80)

TROUBLES = {
    "slow-worker": Trouble(slowness=1.5),
    "fast-worker": Trouble(slowness=0.5),
    "late-loads": Trouble(load_delay_s=0.2),
}
TROUBLED_LOAD = 80
"""Cells with trouble have this load."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the comparison. `trouble` names one of `TROUBLES`; without one, engines are as the router expects."""

    workload: str
    deployment: str
    load: int
    trouble: str | None = None

    @property
    def name(self) -> str:
        name = f"{self.workload}/{self.deployment}/{self.load}"
        return name if self.trouble is None else f"{name}/{self.trouble}"

    @property
    def is_headline(self) -> bool:
        return (self.workload, self.deployment, self.load) == HEADLINE and self.trouble is None


@dataclass(frozen=True, slots=True)
class Effort:
    """Requests and seeds of a cell, and the tolerance of the search for saturation; None takes a guess instead.

    `saturation_rps`, by workload/deployment, is not searched.
    """

    requests: int
    headline_requests: int
    seeds: int
    headline_seeds: int
    tolerance: float | None
    saturation_rps: Mapping[str, float] = field(default_factory=dict)

    def of(self, cell: Cell) -> tuple[int, range]:
        """Give a cell's requests and its seeds."""
        if cell.is_headline:
            return self.headline_requests, range(1, self.headline_seeds + 1)
        return self.requests, range(1, self.seeds + 1)


def all_cells(*, with_recorded: bool) -> Iterator[Cell]:
    """Give every cell; cells of the recorded workload only if there is a trace."""
    for workload in (SYNTHETIC, RECORDED) if with_recorded else (SYNTHETIC,):
        for deployment in DEPLOYMENTS:
            for load in LOADS:
                yield Cell(workload, deployment, load)
            for trouble in TROUBLES:
                yield Cell(workload, deployment, TROUBLED_LOAD, trouble)


def select(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Give the cells whose names match a pattern, such as `S/*/80`; all without patterns.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatchcase(cell.name, pattern) for cell in cells):
            names = ", ".join(cell.name for cell in cells)
            raise ConfigError(f"--cells: {pattern!r} matches none of {names}; workload M needs --trace")
    return [c for c in cells if not patterns or any(fnmatchcase(c.name, p) for p in patterns)]


def read_rates(text: str) -> dict[str, float]:
    """Read `S/8b-bf16=31.9,...`.

    Raises:
        ConfigError: it is something else.
    """
    known = {f"{workload}/{deployment}" for workload in (SYNTHETIC, RECORDED) for deployment in DEPLOYMENTS}
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, rate = part.partition("=")
        try:
            found[name] = float(rate)
        except ValueError:
            found[name] = 0.0
        if name not in known or not 0 < found[name] < math.inf:
            raise ConfigError(
                f"--saturation: {part!r}: expected NAME=RATE with a rate > 0 and one of {', '.join(sorted(known))}"
            )
    return found


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


_PANEL_WIDTH, _PANEL_HEIGHT = 420, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 24, 30, 34
_LEGEND_HEIGHT, _LEGEND_COLUMNS, _LEGEND_ROW = 24, 5, 18
_COLOURS = (
    "#111827", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#db2777", "#65a30d", "#2563eb", "#92400e",
)  # fmt: skip
_STYLE = "text{font:11px sans-serif;fill:#374151}.g{stroke:#e5e7eb}.t{font-weight:bold}"

Means = Mapping[Cell, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True, slots=True)
class _Panel:
    """Loads across, the logarithm of seconds up; `low` and `high` are powers of ten."""

    left: float
    top: float
    loads: Sequence[int]
    low: int
    high: int

    def x(self, load: float) -> float:
        first, last = self.loads[0], self.loads[-1]
        part = (load - first) / (last - first) if last > first else 0.5
        return round(self.left + _LEFT + part * (_PANEL_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, seconds: float) -> float:
        part = (math.log10(seconds) - self.low) / (self.high - self.low)
        return round(self.top + _PANEL_HEIGHT - _BOTTOM - part * (_PANEL_HEIGHT - _TOP - _BOTTOM), 1)


def draw(means: Means) -> str:
    """Draw the cells without trouble, panels side by side, two in a row."""
    groups: dict[tuple[str, str], dict[int, Mapping[str, Mapping[str, float]]]] = {}
    for cell, by_policy in means.items():
        if cell.trouble is None:
            groups.setdefault((cell.workload, cell.deployment), {})[cell.load] = by_policy
    policies = list(dict.fromkeys(policy for by_policy in means.values() for policy in by_policy))
    colours = {policy: _COLOURS[n % len(_COLOURS)] for n, policy in enumerate(policies)}
    parts = []
    for number, ((workload, deployment), by_load) in enumerate(groups.items()):
        place = number % 2 * _PANEL_WIDTH, number // 2 * _PANEL_HEIGHT
        parts += _draw_panel(f"{workload} on {deployment}: mean TTFT, s", place, by_load, colours)
    top = -(-len(groups) // 2) * _PANEL_HEIGHT
    parts += _draw_legend(colours, top)
    height = top + _LEGEND_HEIGHT + -(-len(policies) // _LEGEND_COLUMNS) * _LEGEND_ROW
    width = 2 * _PANEL_WIDTH
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f'<style>{_STYLE}</style>\n<rect width="{width}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _draw_panel(
    title: str,
    place: tuple[float, float],
    by_load: Mapping[int, Mapping[str, Mapping[str, float]]],
    colours: Mapping[str, str],
) -> list[str]:
    left, top = place
    loads = sorted(by_load)
    seconds = [own["ttft_mean_s"] for by_policy in by_load.values() for own in by_policy.values()]
    low = math.floor(math.log10(min(seconds)))
    panel = _Panel(left, top, loads, low, max(math.ceil(math.log10(max(seconds))), low + 1))
    parts = [f'<text class="t" x="{left + _LEFT}" y="{top + 18}">{html.escape(title)}</text>']
    for power in range(panel.low, panel.high + 1):
        y = panel.y(10.0**power)
        parts.append(
            f'<line class="g" x1="{left + _LEFT}" x2="{left + _PANEL_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        )
        parts.append(f'<text x="{left + _LEFT - 6}" y="{y + 4}" text-anchor="end">{10.0**power:g}</text>')
    parts += [
        f'<text x="{panel.x(load)}" y="{top + _PANEL_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{load} %</text>'
        for load in loads
    ]
    for policy, colour in colours.items():
        points = [
            (panel.x(load), panel.y(by_load[load][policy]["ttft_mean_s"]))
            for load in loads
            if policy in by_load[load]
        ]
        line = " ".join(f"{x},{y}" for x, y in points)
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{line}">'
            f"<title>{html.escape(policy)}</title></polyline>"
        )
        parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in points]
    return parts


def _draw_legend(colours: Mapping[str, str], top: float) -> list[str]:
    parts = []
    step = 2 * _PANEL_WIDTH // _LEGEND_COLUMNS
    for number, (policy, colour) in enumerate(colours.items()):
        x = number % _LEGEND_COLUMNS * step + 20
        y = top + 16 + number // _LEGEND_COLUMNS * _LEGEND_ROW
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 9}" y="{y}">{html.escape(policy)}</text>')
    return parts


REUSABLE = 0.25
"""Cells whose workload has more to reuse than this count for the comparison with the best single baseline."""
NEAR = 1.03
"""Within so much of the best baseline of a cell counts as equal to it."""
METRICS = ("ttft_mean_s", "ttft_p99_s", "itl_mean_s", "e2e_mean_s", "e2e_p99_s", "hit_share")


@dataclass(frozen=True, slots=True)
class Summary:
    """Means over seeds by cell and policy, and what they say of `subject`. All ratios are of mean TTFT unless named."""

    subject: str
    means: Mapping[Cell, Mapping[str, Mapping[str, float]]]
    figures: Mapping[str, float]
    best_single: str | None


def summarise(results: Results, subject: str) -> Summary:
    """Compare `subject` with every other policy.

    Args:
        results: of all runs.
        subject: the policy in question.
    """
    means = _means(results)
    figures: dict[str, float] = {}
    for (workload, deployment), rate in results.saturation_rps.items():
        figures[f"saturation_rps {workload}/{deployment}"] = rate
    for (workload, deployment), about in results.workloads.items():
        figures[f"reusable_share {workload}/{deployment}"] = about["reusable_share"]
    best_single = None
    if any(subject in by_policy and len(by_policy) > 1 for by_policy in means.values()):
        figures |= _headline(means, subject)
        best_single = _best_single(means, results, subject)
        if best_single is not None:
            figures["ttft_geomean_over_best_single"] = _geomean_ratio(means, results, subject, best_single)
        figures |= _against_the_best(means, subject)
    figures |= _in_trouble(means, subject)  # which needs no others
    failed = sum(run["failed"] for run in results.runs.values())
    figures["failed_requests"] = failed
    return Summary(subject, means, figures, best_single)


def _means(results: Results) -> dict[Cell, dict[str, dict[str, float]]]:
    runs: dict[Cell, dict[str, list[Mapping[str, float]]]] = {}
    for (cell, policy, _), found in sorted(results.runs.items(), key=lambda item: item[0][2]):
        runs.setdefault(cell, {}).setdefault(policy, []).append(found)
    return {
        cell: {
            policy: {name: sum(run[name] for run in seeds) / len(seeds) for name in seeds[0]}
            for policy, seeds in by_policy.items()
        }
        for cell, by_policy in runs.items()
    }


def _headline(means: Means, subject: str) -> dict[str, float]:
    """Give TTFT and end-to-end ratios of the two best-known policies in the headline cell."""
    found = {}
    for cell, by_policy in means.items():
        if not cell.is_headline or subject not in by_policy:
            continue
        for other in ("round-robin", "least-loaded"):
            if other in by_policy:
                for metric in ("ttft_mean_s", "e2e_mean_s"):
                    name = metric.partition("_")[0]
                    ratio = by_policy[other][metric] / by_policy[subject][metric]
                    found[f"headline_{name}_{other}_over_{subject}"] = ratio
    return found


def _counted(means: Means, results: Results) -> list[Cell]:
    """Give the cells below overload, without trouble, whose reusable share exceeds `REUSABLE`."""
    return [
        cell
        for cell in _plain(means)
        if results.workloads[cell.workload, cell.deployment]["reusable_share"] > REUSABLE
    ]


def _plain(means: Means) -> list[Cell]:
    return [cell for cell in means if cell.trouble is None and cell.load < OVERLOAD]


def _best_single(means: Means, results: Results, subject: str) -> str | None:
    """Name the baseline with the lowest geometric mean; only baselines that ran in every cell count."""
    cells = _counted(means, results)
    if not cells:
        return None
    everywhere = set.intersection(*(set(means[cell]) for cell in cells))
    if subject not in everywhere:
        return None
    return min(
        sorted(everywhere - {subject}),
        key=lambda policy: geometric_mean(means[cell][policy]["ttft_mean_s"] for cell in cells),
        default=None,
    )


def _geomean_ratio(means: Means, results: Results, subject: str, other: str) -> float:
    return geometric_mean(
        means[cell][subject]["ttft_mean_s"] / means[cell][other]["ttft_mean_s"]
        for cell in _counted(means, results)
    )


def _against_the_best(means: Means, subject: str) -> dict[str, float]:
    """Compare the subject with each cell's best baseline, below and in overload."""
    ratios = {cell: _over_best(means[cell], subject) for cell in means if cell.trouble is None}
    below = [ratio for cell, ratio in ratios.items() if cell.load < OVERLOAD and ratio is not None]
    beyond = [ratio for cell, ratio in ratios.items() if cell.load >= OVERLOAD and ratio is not None]
    found = {}
    if below:
        found["cells_near_best_share"] = sum(ratio <= NEAR for ratio in below) / len(below)
        found["ttft_over_best_of_cell_worst"] = max(below)
    if beyond:
        found["overload_ttft_over_best_worst"] = max(beyond)
    return found


def _over_best(by_policy: Mapping[str, Mapping[str, float]], subject: str) -> float | None:
    others = [own["ttft_mean_s"] for policy, own in by_policy.items() if policy != subject]
    if subject not in by_policy or not others:
        return None
    return by_policy[subject]["ttft_mean_s"] / min(others)


def _in_trouble(means: Means, subject: str) -> dict[str, float]:
    """Give the subject's TTFT with trouble over without, and its workers' shares of the load."""
    found: dict[str, float] = {}
    for cell, by_policy in means.items():
        calm = means.get(Cell(cell.workload, cell.deployment, cell.load), {})
        if cell.trouble is None or subject not in by_policy or subject not in calm:
            continue
        own = by_policy[subject]
        for name, value, worst in (
            ("ttft_over_calm_worst", own["ttft_mean_s"] / calm[subject]["ttft_mean_s"], max),
            ("ttft_over_best_worst", _over_best(by_policy, subject), max),
            ("worker_share_min", own["worker_share_min"], min),
            ("worker_share_max", own["worker_share_max"], max),
        ):
            if value is not None:
                key = f"{cell.trouble}_{name}"
                found[key] = worst(found.get(key, value), value)
    return found


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


SUBJECT = "kv"
_QUICK = Effort(requests=250, headline_requests=250, seeds=1, headline_seeds=1, tolerance=None)
_QUICK_CELLS = ("S/8b-bf16/60", "S/8b-bf16/80")
_TOLERANCE = 0.03
_SHOWN = ("round-robin", "least-loaded")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="workload M, in Mooncake's format; left out without"
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="results so far; the same file goes on where the last run ended (default: keep none)",
    )
    parser.add_argument(
        "--policies",
        metavar="NAMES",
        help="names, or module:Class, with commas between (default: all but session, which is kv with sessions)",
    )
    parser.add_argument(
        "--ablations",
        action="store_true",
        help="kv, product, and kv without each of its terms, kv without holding, product with it, instead of --policies",
    )
    parser.add_argument(
        "--cells", metavar="PATTERNS", help="only these cells, such as S/*/80,M/8b-bf16/* (default: all)"
    )
    parser.add_argument("--again", metavar="NAMES", help="run these policies again, whatever --state knows")
    parser.add_argument(
        "--requests", type=int, default=20_000, metavar="N", help="of a cell (default %(default)s)"
    )
    parser.add_argument(
        "--headline-requests",
        type=int,
        default=100_000,
        metavar="N",
        help="of S/70b-fp8/80 (default %(default)s)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="of a cell (default %(default)s)",
    )
    parser.add_argument(
        "--headline-seeds", type=int, metavar="N", help="of S/70b-fp8/80 (default: 2 more than of a cell)"
    )
    parser.add_argument(
        "--saturation",
        metavar="RATES",
        help="requests/s to take instead of searching, such as S/8b-bf16=31.9,M/8b-bf16=9 (an earlier run's figures)",
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="PLACE=VALUE",
        help="set this in every graph, such as router.queue.threshold_s=null; may be repeated",
    )
    add_simulations(parser)
    parser.add_argument("--plot", type=Path, metavar="OUT", help="draw mean TTFT by load as SVG")


def run(options: argparse.Namespace) -> BenchReport:
    """Run every cell with every policy, and compare.

    Raises:
        ConfigError: an option or file is wrong.
        PenstockError: a run could not be ended.
    """
    _check(options)
    policies = _policies(options)
    effort = _QUICK if options.quick else _effort(options)
    patterns = options.cells.split(",") if options.cells else (_QUICK_CELLS if options.quick else ())
    cells = select(list(all_cells(with_recorded=options.trace is not None)), patterns)
    again = {policies.get(name, name) for name in (options.again or "").split(",")}
    cache = Cache(options.state).forget(lambda key: key.partition(" ")[0].removeprefix("policy=") in again)
    runner = Runner(options.jobs, cache)
    results = Comparison(
        options.examples, options.trace, policies, effort, runner, tuple(options.settings)
    ).run(cells)
    summary = summarise(results, SUBJECT)
    if options.plot is not None:
        options.plot.write_text(draw(summary.means), encoding="utf-8")
    _print_table(summary)
    return _report(summary, results, options, effort)


def _check(options: argparse.Namespace) -> None:
    expect_at_least(options, requests=50, headline_requests=50, seeds=1, headline_seeds=1, jobs=1)
    if options.plot is not None and (options.plot.is_dir() or not options.plot.parent.is_dir()):
        raise ConfigError(f"--plot: {options.plot}: expected a file in a directory that exists")
    if options.trace is not None:
        read_trace(options.trace)


def _policies(options: argparse.Namespace) -> dict[str, str]:
    """Give values of `router.policy` by name.

    `session` is left out unless asked for: without sessions it equals `kv`.
    """
    known = {name: name for name in POLICIES} | BASELINES | ABLATIONS
    if options.ablations and options.policies:
        raise ConfigError("--ablations: names its own policies; leave --policies out")
    if options.ablations:
        names = [SUBJECT, "product", *ABLATIONS]
    elif options.policies:
        names = options.policies.split(",")
    else:
        names = [name for name in known if name != SessionAffinity.name and name not in ABLATIONS]
    found = {name: known.get(name, name) for name in names}
    for policy in found.values():
        make_policy(policy)
    return found


def _effort(options: argparse.Namespace) -> Effort:
    return Effort(
        requests=options.requests,
        headline_requests=options.headline_requests,
        seeds=options.seeds,
        headline_seeds=options.headline_seeds or options.seeds + 2,
        tolerance=_TOLERANCE,
        saturation_rps=read_rates(options.saturation or ""),
    )


def _report(summary: Summary, results: Results, options: argparse.Namespace, effort: Effort) -> BenchReport:
    samples: dict[str, Sequence[float]] = {}
    for (cell, policy, _), found in sorted(
        results.runs.items(), key=lambda item: (item[0][0].name, item[0][1], item[0][2])
    ):
        for metric in METRICS:
            samples.setdefault(f"{cell.name} {policy} {metric}", []).append(found[metric])  # type: ignore[attr-defined]
    failed = int(summary.figures["failed_requests"])
    return BenchReport(
        name="policies",
        config={
            "trace": None if options.trace is None else options.trace.name,
            "subject": summary.subject,
            "best_single": summary.best_single,
            "requests": effort.requests,
            "headline_requests": effort.headline_requests,
            "seeds": effort.seeds,
            "headline_seeds": effort.headline_seeds,
            "quick": options.quick,
            "settings": list(options.settings),
            "cells": [cell.name for cell in summary.means],
            "workloads": {"/".join(key): dict(about) for key, about in results.workloads.items()},
        },
        figures=summary.figures,
        samples=samples,
        problems=[f"{failed} requests failed; a comparison counts only where none does"] if failed else (),
    )


def _print_table(summary: Summary) -> None:
    table = Table(title="mean TTFT in seconds", box=None)
    for column in ("cell", summary.subject, "best other", "", "ratio", *_SHOWN):
        is_name = column in {"cell", "best other"}
        table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
    for cell, by_policy in summary.means.items():
        seconds = {policy: own["ttft_mean_s"] for policy, own in by_policy.items()}
        own_s = seconds.pop(summary.subject, None)
        best = min(seconds, key=seconds.__getitem__, default=None)
        best_s = None if best is None else seconds[best]
        ratio = None if own_s is None or best_s is None else own_s / best_s
        shown = [_text(value) for value in (best_s, ratio, *(seconds.get(name) for name in _SHOWN))]
        table.add_row(cell.name, _text(own_s), best or "-", *shown)
    Console().print(table)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
