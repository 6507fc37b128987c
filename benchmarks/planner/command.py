"""`python -m benchmarks planner`: its options, run and report."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.planner.case import DISAGGREGATED, Case
from benchmarks.planner.comparison import BASELINES, HELD, Found, compare
from benchmarks.planner.planned import ROLES, WITHOUT_FLIPS
from benchmarks.planner.world.fleets import SLOS
from benchmarks.runner import Cache, Runner, default_jobs
from penstock.bench.report import BenchReport
from penstock.core.errors import ConfigError
from penstock.planner.demand import SloTargets

_HOUR_S = 3600.0
_ROLES = ("planner-disaggregated", WITHOUT_FLIPS, "planner-switching", "planner")
MADE = (
    Case("diurnal_70b_start60", "diurnal", "70b", 32.0, 60.0, span_s=8 * _HOUR_S),
    Case("diurnal_70b_start300", "diurnal", "70b", 32.0, 300.0, span_s=8 * _HOUR_S),
    Case("steady_8b_start60", "steady", "8b", 45.0, 60.0, span_s=2 * _HOUR_S),
    Case(
        "growing_8b_start60",
        "growing",
        "8b",
        12.0,
        60.0,
        span_s=4 * _HOUR_S,
        roles=DISAGGREGATED,
        planners=_ROLES,
    ),
    Case(
        "alternating_8b_start300",
        "alternating",
        "8b",
        24.0,
        300.0,
        span_s=2 * _HOUR_S,
        roles=DISAGGREGATED,
        planners=_ROLES,
    ),
)
"""The cases that need no trace."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="run this trace in Azure's or Mooncake's format; without it, the days that are made from a seed",
    )
    parser.add_argument(
        "--copies",
        type=float,
        default=30.0,
        metavar="N",
        help="requests for each row of the trace (default %(default)s)",
    )
    parser.add_argument(
        "--model",
        choices=tuple(SLOS),
        default="8b",
        help="the model that serves the trace (default %(default)s)",
    )
    parser.add_argument("--slo-ttft", type=float, metavar="S", help="target of TTFT (default: the model's)")
    parser.add_argument("--slo-itl", type=float, metavar="S", help="target of ITL (default: the model's)")
    parser.add_argument(
        "--cases", metavar="NAMES", help="only these cases, with commas between (default: all)"
    )
    parser.add_argument(
        "--leave-out",
        metavar="NAMES",
        help=f"do not run these baselines, with commas between: {', '.join(BASELINES)} (default: run all)",
    )
    parser.add_argument("--state", type=Path, metavar="FILE", help="runs so far; the same file goes on")
    parser.add_argument(
        "--jobs", type=int, default=default_jobs(), metavar="N", help="processes (default: all cores)"
    )
    parser.add_argument(
        "--examples", type=Path, default=Path("examples"), metavar="DIR", help="graphs and profiles"
    )


def run(options: argparse.Namespace) -> BenchReport:
    """Run every case with every strategy.

    Raises:
        ConfigError: an option or file is wrong.
        PenstockError: a run could not be ended.
    """
    _check(options)
    _left_out(options)
    cases = _cases(options)
    found = []
    with Runner(options.jobs, Cache(options.state)) as runner:
        for case in cases:
            found.append(compare(case, runner, options.examples, _left_out(options)))
            _print(found[-1])
    return _report(found, options)


def _check(options: argparse.Namespace) -> None:
    for name in ("copies", "slo_ttft", "slo_itl"):
        value = getattr(options, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"--{name.replace('_', '-')}: must be a finite number above 0, got {value:g}")
    if options.jobs < 1:
        raise ConfigError(f"--jobs: must be >= 1, got {options.jobs}")


def _left_out(options: argparse.Namespace) -> list[str]:
    names = options.leave_out.split(",") if options.leave_out else []
    for name in names:
        if name not in BASELINES:
            raise ConfigError(f"--leave-out: {name!r} is no baseline; there are {', '.join(BASELINES)}")
    return names


def _cases(options: argparse.Namespace) -> list[Case]:
    if options.quick:
        return [Case("steady", "steady", "8b", 20.0, 60.0, span_s=600.0)]
    cases: Sequence[Case] = MADE
    if options.trace is not None:
        model = options.model
        slo = SLOS[model]
        slo = SloTargets(ttft_s=options.slo_ttft or slo.ttft_s, itl_s=options.slo_itl or slo.itl_s)
        cases = [
            Case(
                f"trace_{model}_start{start_s}",
                "trace",
                model,
                options.copies,
                start_s,
                options.trace,
                slo=slo,
            )
            for start_s in (60, 300)
        ]
    if options.cases is None:
        return list(cases)
    names = options.cases.split(",")
    known = {case.name: case for case in cases}
    for name in names:
        if name not in known:
            raise ConfigError(f"--cases: {name!r} is not known; there are {', '.join(known)}")
    return [known[name] for name in names]


def _print(found: Found) -> None:
    table = Table(title=found.case.name, box=None)
    for column in ("strategy", "setting", "attainment", "GPU-hours", "of static", "changes/h", "failed"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    whole = found.chosen["static-peak"]["gpu_hours"]
    for name, own in found.chosen.items():
        table.add_row(
            name,
            "+".join(f"{value:g}" for value in found.settings[name]),
            f"{own['attainment']:.2%}",
            f"{own['gpu_hours']:.1f}",
            f"{own['gpu_hours'] / whole:.0%}",
            f"{own['changes_per_hour']:.1f}",
            f"{own['failed']:.0f}",
        )
    Console().print(table)


def _report(found: list[Found], options: argparse.Namespace) -> BenchReport:
    figures: dict[str, float] = {}
    samples: dict[str, list[float]] = {}
    failed = 0.0
    for each in found:
        figures |= each.figures()
        samples |= each.timelines()
        for name, tried in each.tried.items():
            for setting, own in sorted(tried, key=lambda one: one[0]):
                place = " ".join([each.case.name, name, *(f"{value:g}" for value in setting)])
                samples[place] = [own["attainment"], own["gpu_hours"], own["changes_per_hour"]]
                failed += own["failed"] if name in ROLES else 0
    return BenchReport(
        name="planner",
        config={
            "trace": None if options.trace is None else options.trace.name,
            "copies": options.copies,
            "quick": options.quick,
            "held": HELD,
            "cases": {each.case.name: each.case.key for each in found},
            "settings": {
                each.case.name: {name: list(setting) for name, setting in each.settings.items()}
                for each in found
            },
            "slo": {each.case.name: [each.case.targets.ttft_s, each.case.targets.itl_s] for each in found},
            "span_s": {each.case.name: each.case.workload().span_s for each in found},
            "requests": {each.case.name: each.case.workload().requests for each in found},
            "samples": "attainment, GPU-hours, changes of direction an hour; `over time`: one value a bin",
        },
        figures=figures,
        samples=samples,
        problems=[f"{failed:.0f} requests failed with the planner"] if failed else (),
    )
