"""`penstock simulate`, `plan`, `profile`, `bench` and `doctor`: commands that ask no running deployment. Their packages do the work."""

import argparse
from pathlib import Path

from penstock.cli.parser import Parser, add_set
from penstock.core import log


def add_simulate(parser: Parser) -> None:
    """Add the arguments of `penstock simulate`."""
    from penstock.sim.arguments import add_arguments  # noqa: PLC0415

    parser.description = (
        "Run a workload on a simulated deployment: the real router and workers, on virtual time."
    )
    parser.epilog = "Exit code: 0 simulated, 1 no request completed, 2 wrong input, 130 interrupted. See docs/simulation.md."
    add_arguments(parser)
    add_set(parser, "set a field of the graph, as for serve")
    parser.set_defaults(run=_simulate)


def add_plan(parser: Parser) -> None:
    """Add the arguments of `penstock plan`."""
    from penstock.plan.arguments import add_arguments  # noqa: PLC0415

    parser.description = (
        "Find the best deployment of N devices: aggregated or disaggregated, parallelism, number of workers and step"
        " size. Searched by the latency model, confirmed by the simulator."
    )
    parser.epilog = (
        "Exit code: 0 planned, 2 wrong input, or nothing fits or keeps the targets. See docs/plan.md."
    )
    add_arguments(parser)
    parser.set_defaults(run=_plan)


def add_profile(parser: Parser) -> None:
    """Add the arguments of `penstock profile`."""
    from penstock.profiling.arguments import add_arguments  # noqa: PLC0415

    parser.description = (
        "Measure an engine in this process, or an OpenAI-compatible endpoint by URL, and fit the latency"
        " model that the router and the simulator use."
    )
    add_arguments(parser)
    add_set(parser, "set a field of the engine, as for serve")
    parser.set_defaults(run=_profile)


def add_bench(parser: Parser) -> None:
    """Add the benches of `penstock bench`."""
    from penstock.bench import BENCHES  # noqa: PLC0415

    parser.description = "Measure, and write one JSON."
    BENCHES.add_names(parser)


def add_doctor(parser: Parser) -> None:
    """Add the arguments of `penstock doctor`."""
    parser.description = (
        "List the engines that run here, and test every transport between every pair of memory kinds, within a process"
        " and between two. Prints the reason for each that does not work, the command that mends it, and the host settings to"
        " change. Takes 5 to 10 s."
    )
    parser.epilog = (
        "Exit code: 0, or 1 if a transfer failed that should work. See docs/engines.md and docs/transfer.md."
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all findings to this file too")
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="directory for the file test, which uses 64 MB briefly (default: the directory for temporary files)",
    )
    parser.set_defaults(run=_doctor)


def _simulate(options: argparse.Namespace) -> int:
    from penstock.sim.command import run_command  # noqa: PLC0415
    from penstock.sim.deployment import warn_of_exact  # noqa: PLC0415

    log.configure("error", process="simulate")
    warn_of_exact()
    return run_command(options)


def _plan(options: argparse.Namespace) -> int:
    from penstock.plan.command import run_command  # noqa: PLC0415
    from penstock.sim.deployment import warn_of_exact  # noqa: PLC0415

    warn_of_exact()
    return run_command(options)


def _profile(options: argparse.Namespace) -> int:
    from penstock.profiling.command import run_command  # noqa: PLC0415

    log.configure("critical", process="profile")
    return run_command(options)


def _doctor(options: argparse.Namespace) -> int:
    from penstock.doctor.command import run_command  # noqa: PLC0415

    log.configure("error", process="doctor")
    return run_command(options.json, options.directory)
