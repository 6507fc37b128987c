"""Several routers against one on the same requests: how much worse routers choose that see each other's load late.

Requests go to the frontends in turn, as from a plain load balancer. The routers share nothing but the workers.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.policies import read_rates
from benchmarks.runner import (
    RECORDED,
    SYNTHETIC,
    Figures,
    Run,
    Runner,
    Workload,
    add_simulations,
    expect_at_least,
    find_graph,
)
from penstock.bench.report import BenchReport
from penstock.sim.trace import read_trace

SATURATION_RPS = {
    (SYNTHETIC, "70b-fp8"): 18.9,
    (SYNTHETIC, "8b-bf16"): 31.3,
    (RECORDED, "70b-fp8"): 6.95,
    (RECORDED, "8b-bf16"): 14.3,
}
"""Requests per second that one router just sustains, found by `python -m benchmarks policies`; `--saturation` overrides them."""
LOADS = (60, 80, 95)
"""In per cent of saturation."""
WORSE_MAX = 1.15
"""The largest ratio of p99 TTFT that is no problem."""
_METRICS = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s")
_QUICK_REQUESTS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="workload M, in Mooncake's format; left out without"
    )
    parser.add_argument(
        "--routers", type=int, default=4, metavar="N", help="frontends beside one (default %(default)s)"
    )
    parser.add_argument(
        "--requests", type=int, default=6000, metavar="N", help="of a run (default %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="runs of each kind (default %(default)s)"
    )
    parser.add_argument(
        "--saturation",
        metavar="RATES",
        help="requests/s that one router sustains, such as S/8b-bf16=31.9,M/8b-bf16=9, as `bench policies` finds them",
    )
    add_simulations(parser)


def run(options: argparse.Namespace) -> BenchReport:
    """Run every workload and deployment at every load, with one router and with several.

    Raises:
        ConfigError: an option or file is wrong.
    """
    expect_at_least(options, routers=2, requests=50, seeds=1, jobs=1)
    if options.trace is not None:
        read_trace(options.trace)
    runs = dict(_runs(options))
    keys = {run: key for key, run in runs.items()}
    results: dict[Run, Figures] = {}
    with Runner(options.jobs) as runner:
        for run, figures in runner.run_many(keys):
            cell, routers, seed = keys[run]
            _tell(f"{cell}, {routers} at once, seed {seed}: p99 TTFT {figures['ttft_p99_s']:.3f} s")
            results[run] = figures
    found: dict[str, dict[int, list[float]]] = {}
    for (cell, routers, _), run in runs.items():
        for metric in _METRICS:
            found.setdefault(f"{cell} {metric}", {}).setdefault(routers, []).append(results[run][metric])
    return _report(found, options)


def _runs(options: argparse.Namespace) -> Iterator[tuple[tuple[str, int, int], Run]]:
    cells = [(*place, load) for place in SATURATION_RPS for load in LOADS]
    if options.trace is None:
        cells = [cell for cell in cells if cell[0] != RECORDED]
    if options.quick:
        cells = cells[-1:]
    saturation = _saturation(options)
    requests, seeds = (_QUICK_REQUESTS, 1) if options.quick else (options.requests, options.seeds)
    for name, deployment, load in cells:
        rate_per_s = saturation[f"{name}/{deployment}"] * load / 100
        for seed, routers in product(range(1, seeds + 1), (1, options.routers)):
            workload = Workload(name, requests, options.trace if name == RECORDED else None)
            graph = find_graph(options.examples, deployment, (f"frontend.processes={routers}",))
            run = Run(graph, workload, rate_per_s, seed=seed)
            yield (f"{name}/{deployment}/{load}", routers, seed), run


def _saturation(options: argparse.Namespace) -> dict[str, float]:
    usual = {"/".join(place): rate for place, rate in SATURATION_RPS.items()}
    return usual | read_rates(options.saturation or "")


def _report(found: Mapping[str, Mapping[int, list[float]]], options: argparse.Namespace) -> BenchReport:
    """Compare several routers with one: ratios of means over the seeds, for each cell and for the worst cell."""
    ratios: dict[str, dict[str, float]] = {metric: {} for metric in _METRICS}
    samples: dict[str, list[float]] = {}
    for name, by_routers in found.items():
        cell, metric = name.split(" ")
        ratios[metric][cell] = float(np.mean(by_routers[options.routers]) / np.mean(by_routers[1]))
        samples |= {f"{cell} routers={n} {metric}": values for n, values in by_routers.items()}
    named = {}
    for metric, cells in ratios.items():
        short = metric.removesuffix("_s")
        named[f"routers_{short}_ratio_worst"] = max(cells.values())
        named[f"routers_{short}_ratio_geomean"] = math.exp(float(np.mean(np.log(list(cells.values())))))
        named |= {f"{cell} {short}_ratio": ratio for cell, ratio in cells.items()}
    worse = {cell: ratio for cell, ratio in ratios["ttft_p99_s"].items() if ratio > WORSE_MAX}
    return BenchReport(
        name="routers",
        config={
            "routers": options.routers,
            "requests": _QUICK_REQUESTS if options.quick else options.requests,
            "seeds": 1 if options.quick else options.seeds,
            "trace": None if options.trace is None else options.trace.name,
            "saturation_rps": _saturation(options),
            "quick": options.quick,
        },
        figures=named,
        samples=samples,
        problems=()
        if options.quick
        else [
            f"{cell}: the p99 TTFT of {options.routers} routers is {ratio:.2f} times one's, more than {WORSE_MAX}"
            for cell, ratio in worse.items()
        ],
    )


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
