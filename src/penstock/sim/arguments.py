"""Arguments of `penstock simulate`, in a module with few imports, so that `penstock --help` is fast."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
