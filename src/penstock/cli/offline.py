"""`penstock simulate`, `plan`, `profile`, `bench` and `doctor`: commands that ask no running deployment. Their packages do the work."""

import argparse
from pathlib import Path

from penstock.cli.parser import Parser, add_set
from penstock.core import log

_FORMATS = {
    "--weight-dtype": "number format of the weights, such as fp8 (default: the checkpoint's)",
    "--expert-dtype": "number format of routed experts (default: that of the weights)",
    "--kv-dtype": "number format of the KV cache (default: that of the weights, or fp8 where they are narrower)",
}


def add_simulate(parser: Parser) -> None:
    """Add the arguments of `penstock simulate`."""
    parser.description = (
        "Run a workload on a simulated deployment: the real router and workers, on virtual time."
    )
    parser.epilog = "Exit code: 0 simulated, 1 no request completed, 2 wrong input, 130 interrupted. See docs/simulation.md."
    _simulate_arguments(parser)
    add_set(parser, "set a field of the graph, as for serve")
    parser.set_defaults(run=_simulate)


def add_plan(parser: Parser) -> None:
    """Add the arguments of `penstock plan`."""
    parser.description = (
        "Find the best deployment of N devices: aggregated or disaggregated, parallelism, number of workers and step"
        " size. Searched by the latency model, confirmed by the simulator."
    )
    parser.epilog = (
        "Exit code: 0 planned, 2 wrong input, or nothing fits or keeps the targets. See docs/plan.md."
    )
    _plan_arguments(parser)
    parser.set_defaults(run=_plan)


def add_profile(parser: Parser) -> None:
    """Add the arguments of `penstock profile`."""
    parser.description = (
        "Measure an engine in this process, or an OpenAI-compatible endpoint by URL, and fit the latency"
        " model that the router and the simulator use."
    )
    _profile_arguments(parser)
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


def _simulate_arguments(parser: Parser) -> None:
    parser.add_argument(
        "workload",
        metavar="TRACE_OR_SPEC",
        help="a trace (Mooncake JSONL or Azure CSV, plain or gzipped), or a synthetic workload (.yaml)",
    )
    parser.add_argument("--graph", metavar="FILE", help="the deployment")
    parser.add_argument(
        "--compare", nargs="+", default=[], metavar="FILE", help="several deployments, side by side"
    )
    parser.add_argument("--policy", metavar="NAME", help="routing policy, such as kv or round-robin")
    parser.add_argument(
        "--slo-ttft", type=float, metavar="S", help="target for the time to the first token, in seconds"
    )
    parser.add_argument(
        "--slo-itl", type=float, metavar="S", help="target for the mean time between tokens, in seconds"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default 0)")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N of a trace")
    parser.add_argument("--speed", type=float, metavar="X", help="run a trace X times as fast")
    parser.add_argument(
        "--rate", type=float, metavar="R", help="rescale a trace to R requests per second on average"
    )
    parser.add_argument(
        "--hit-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="share of prompt tokens that an infinite cache would hit, for a trace without prefixes (default 0)",
    )
    parser.add_argument("--skip-bad", action="store_true", help="skip and count lines that cannot be read")
    parser.add_argument(
        "--engine-profile",
        type=Path,
        metavar="FILE",
        help="run the simulated engines on a measured profile instead of the roofline",
    )
    parser.add_argument(
        "--worker-start",
        type=float,
        metavar="S",
        help="seconds that a worker takes to start, for a graph with a planner (default 60)",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="simulate every engine step: far slower, to check results",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report to this file, as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="OUT", help="write the report with charts; it opens offline"
    )


def _plan_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a known shape, such as llama-3.1-70b, or a directory with a config.json",
    )
    add("--hardware", required=True, metavar="NAME", help="device type, such as h100")
    add("--gpus", type=int, required=True, metavar="N", help="how many there are")
    add("--isl", type=int, required=True, metavar="N", help="prompt tokens of a request")
    add("--osl", type=int, required=True, metavar="N", help="tokens of its answer")
    add(
        "--slo-ttft",
        type=float,
        required=True,
        metavar="S",
        help="target for the time to the first token, in seconds",
    )
    add(
        "--slo-itl",
        type=float,
        required=True,
        metavar="S",
        help="target for the mean time between tokens, in seconds",
    )
    add(
        "--percentile",
        type=float,
        default=90.0,
        metavar="P",
        help="share of requests that must meet each target, in percent (default 90)",
    )
    for flag, text in _FORMATS.items():
        add(flag, default="auto", metavar="F", help=text)
    add("--out", type=Path, metavar="GRAPH", help="write the best deployment to this file, as a graph")
    add(
        "--plot",
        type=Path,
        metavar="OUT",
        help="write a page that charts tokens/s per user against tokens/s per GPU; it opens offline",
    )
    add("--json", type=Path, metavar="OUT", help="write all results to this file, as JSON")


def _profile_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("target", metavar="ENGINE_OR_URL", help="paged or mock, or a URL such as http://127.0.0.1:8000")
    add("--out", type=Path, required=True, metavar="FILE", help="write the profile to this file (JSON)")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="write the page of charts here (default beside --out, .html)",
    )
    add(
        "--model",
        metavar="M",
        help="of an engine: a checkpoint's directory or hub name (default: the demo model); of a URL: the name"
        " as listed there (default: the only one)",
    )
    add("--hardware", metavar="NAME", help="device type, such as h100 (default cpu for an engine)")
    add("--api-key", metavar="KEY", help="sent to a URL as a bearer token")
    add("--prompt-tokens", metavar="N,N", help="prompt lengths to measure")
    add("--contexts", metavar="N,N", help="context lengths of decode cells and of cached prefixes")
    add("--batches", metavar="N,N", help="sequences to decode at once")
    add("--repeats", type=int, metavar="N", help="measurements of each cell (default 7; 3 with --quick)")
    add(
        "--held-out",
        type=int,
        metavar="N",
        help="held-out points of each kind (default 12; 6 with --quick)",
    )
    add(
        "--max-seconds",
        type=float,
        metavar="S",
        help="longest time of the measurement (default 900; 40 with --quick)",
    )
    add(
        "--request-timeout",
        type=float,
        metavar="S",
        help="of a URL: it has stopped answering when one request takes longer (default 60)",
    )
    add("--quick", action="store_true", help="few cells, in less than a minute")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of prompts, order and held-out points (default 0)",
    )
