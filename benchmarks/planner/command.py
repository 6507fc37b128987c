"""`python -m benchmarks planner`: its options, run and report."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.planner.case import Case
from benchmarks.planner.comparison import HELD, Found, compare
from benchmarks.runner import Cache, Runner, default_jobs
from penstock.bench.report import Report
from penstock.core.errors import ConfigError
from penstock.sim.workload.trace import read_trace

_STEADY_PER_S = 80.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="a trace in Azure's or Mooncake's format; left out without"
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
        choices=("8b", "70b"),
        default="8b",
        help="the model that serves the trace (default %(default)s)",
    )
    parser.add_argument(
        "--cases", metavar="NAMES", help="only these cases, with commas between (default: all)"
    )
    parser.add_argument("--state", type=Path, metavar="FILE", help="runs so far; the same file goes on")
    parser.add_argument(
        "--jobs", type=int, default=default_jobs(), metavar="N", help="processes (default: all cores)"
    )
    parser.add_argument(
        "--examples", type=Path, default=Path("examples"), metavar="DIR", help="graphs and profiles"
    )


def run(options: argparse.Namespace) -> Report:
    """Run every case with every strategy.

    Raises:
        ConfigError: an option or file is wrong.
        PenstockError: a run could not be ended.
    """
    _check(options)
    cases = _cases(options)
    found = []
    with Runner(options.jobs, Cache(options.state)) as runner:
        for case in cases:
            found.append(compare(case, runner, options.examples, ["planner"]))
            _print(found[-1])
    return _report(found, options)


def _check(options: argparse.Namespace) -> None:
    if not options.copies > 0:
        raise ConfigError(f"--copies: must be above 0, got {options.copies:g}")
    if options.jobs < 1:
        raise ConfigError(f"--jobs: must be >= 1, got {options.jobs}")
    if options.trace is not None:
        read_trace(options.trace)


def _cases(options: argparse.Namespace) -> list[Case]:
    if options.quick:
        return [Case("steady", "steady", "8b", 20.0, 60.0, span_s=600.0)]
    cases = []
    if options.trace is not None:
        model = options.model
        cases += [
            Case(f"trace_{model}_start{start_s}", "trace", model, options.copies, start_s, options.trace)
            for start_s in (60, 300)
        ]
    cases += [
        Case("diurnal_70b_start60", "diurnal", "70b", 24.0, 60.0),
        Case("diurnal_70b_start300", "diurnal", "70b", 24.0, 300.0),
        Case("steady_8b_start60", "steady", "8b", _STEADY_PER_S, 60.0, span_s=7200.0),
    ]
    if options.cases is None:
        return cases
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
            f"{own['setting']:g}",
            f"{own['attainment']:.2%}",
            f"{own['gpu_hours']:.1f}",
            f"{own['gpu_hours'] / whole:.0%}",
            f"{own['changes_per_hour']:.1f}",
            f"{own['failed']:.0f}",
        )
    Console().print(table)


def _report(found: list[Found], options: argparse.Namespace) -> Report:
    figures: dict[str, float] = {}
    samples: dict[str, list[float]] = {}
    failed = 0.0
    for each in found:
        figures |= each.figures()
        for name, tried in each.tried.items():
            for setting, own in sorted(tried, key=lambda one: one[0]):
                place = f"{each.case.name} {name} {setting:g}"
                samples[place] = [own["attainment"], own["gpu_hours"], own["changes_per_hour"]]
                failed += own["failed"] if name == "planner" else 0
    return Report(
        name="planner",
        config={
            "trace": None if options.trace is None else options.trace.name,
            "copies": options.copies,
            "quick": options.quick,
            "held": HELD,
            "cases": {each.case.name: each.case.key for each in found},
            "settings": {
                each.case.name: {name: own["setting"] for name, own in each.chosen.items()} for each in found
            },
            "samples": "attainment, GPU-hours, changes of direction an hour",
        },
        figures=figures,
        samples=samples,
        problems=[f"{failed:.0f} requests failed with the planner"] if failed else (),
    )
