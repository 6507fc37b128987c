"""The pictures of the docs, drawn from the reports in benchmarks/results."""

from collections.abc import Callable, Iterator, Mapping
from math import nan

from benchmarks import policies as policies_plot
from benchmarks.disagg import plot as disagg_plot
from benchmarks.disagg.choice import Point
from benchmarks.eviction import plot as eviction_plot
from benchmarks.kv.retention import plot as retention_plot
from benchmarks.planner import plot as planner_plot
from benchmarks.policies import Cell
from benchmarks.transfer import plot as transfer_plot
from penstock.bench.report import BenchReport
from tables.planner import PLANNERS, first_planner, made
from tables.policies import POLICIES, mean
from tables.read import report

_MORE_POLICIES = ("power-of-two", "random")


def disagg() -> str:
    figures: Mapping[str, float] = report("disagg")["figures"]
    start = "itl_p99_ms_aggregated_c"
    chunks = sorted(int(name.removeprefix(start)) for name in figures if name.startswith(start))
    points = [_point(figures, f"aggregated_c{chunk}", chunk) for chunk in chunks]
    (best,) = (point for point in points if point.chunk == figures["chunk_aggregated_strict"])
    return disagg_plot.draw(_point(figures, "disaggregated_strict", 0), points, best)


def _point(figures: Mapping[str, float], side: str, chunk: int) -> Point:
    drawn = ("itl_p99_ms", "ttft_p99_ms", "output_tokens_per_s")
    return Point(
        chunk=chunk, itl_p999_ms=nan, itl_max_ms=nan, **{name: figures[f"{name}_{side}"] for name in drawn}
    )


def eviction() -> str:
    return eviction_plot.draw(report("eviction")["figures"])


def kv_retention() -> str:
    found = report("kv_retention")
    return retention_plot.draw(found["figures"], found["config"]["blocks"])


_MADE = ("planner", "planner_day", "planner_day_300", "planner_steady")
"""Reports of days that are made from a seed."""


def planner() -> str:
    """The planner on the days that are made."""
    return planner_plot.draw([row for name, row in _runs() if name in _MADE])


def planner_traces() -> str:
    """The planner on traces."""
    return planner_plot.draw([row for name, row in _runs() if name not in _MADE])


def _runs() -> Iterator[tuple[str, planner_plot.Row]]:
    """Give report and run of each case's planner, and of the one that switches between kinds of deployment."""
    for name, case, title, settings in made():
        for strategy in (first_planner(settings), "planner-switching"):
            if strategy in settings:
                series = _over_time(name, case, strategy)
                oracle = {
                    key: values
                    for key, values in _over_time(name, case, "oracle").items()
                    if key.startswith("workers_")
                }
                hours = report(name)["config"]["span_s"][case] / 3600
                title_of = f"{title}: {PLANNERS[strategy]}"
                yield name, planner_plot.Row(title_of, hours, series, oracle)


def _over_time(name: str, case: str, strategy: str) -> dict[str, list[float]]:
    start = f"{case} {strategy} over time "
    return {
        key.removeprefix(start): values
        for key, values in report(name)["samples"].items()
        if key.startswith(start)
    }


def policies() -> str:
    """Mean TTFT of every policy, over the seeds of each cell."""
    means: dict[Cell, dict[str, dict[str, float]]] = {}
    for name in report("policies")["config"]["cells"]:
        workload, deployment, load, *trouble = name.split("/")
        found = {
            policy: mean("policies", name, policy, "ttft_mean_s") for policy in (*POLICIES, *_MORE_POLICIES)
        }
        means[Cell(workload, deployment, int(load), *trouble)] = {
            policy: {"ttft_mean_s": value} for policy, value in found.items() if value is not None
        }
    return policies_plot.draw(means)


def transfer() -> str:
    found = report("transfer")
    return transfer_plot.draw(
        BenchReport(name="transfer", config={}, figures=found["figures"], limits=found["limits"])
    )


PICTURES: dict[str, Callable[[], str]] = {
    "disagg.svg": disagg,
    "eviction.svg": eviction,
    "kv-retention.svg": kv_retention,
    "planner.svg": planner,
    "planner-traces.svg": planner_traces,
    "policies.svg": policies,
    "transfer.svg": transfer,
}
"""What draws each picture, by its file in docs."""
