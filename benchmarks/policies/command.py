"""`python -m benchmarks policies`: its options, run and report."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.baselines import ABLATIONS, BASELINES
from benchmarks.policies.cells import Effort, all_cells, read_rates, select
from benchmarks.policies.comparison import Comparison, Results
from benchmarks.policies.plot import draw
from benchmarks.policies.summary import METRICS, Summary, summarise
from benchmarks.runner import Cache, Runner, add_simulations, expect_at_least
from penstock.bench.report import Report
from penstock.core.errors import ConfigError
from penstock.router.policy.policies import POLICIES, make_policy
from penstock.router.policy.session_affinity import SessionAffinity
from penstock.sim.workload.trace import read_trace

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


def run(options: argparse.Namespace) -> Report:
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


def _report(summary: Summary, results: Results, options: argparse.Namespace, effort: Effort) -> Report:
    samples: dict[str, Sequence[float]] = {}
    for (cell, policy, _), found in sorted(
        results.runs.items(), key=lambda item: (item[0][0].name, item[0][1], item[0][2])
    ):
        for metric in METRICS:
            samples.setdefault(f"{cell.name} {policy} {metric}", []).append(found[metric])  # type: ignore[attr-defined]
    failed = int(summary.figures["failed_requests"])
    return Report(
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
