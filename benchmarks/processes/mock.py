"""Everything but the model: `penstock serve --engine mock` under load, client included.

The limit is the same load on a server that does nothing (`benchmarks.processes.canned`), in the same run.
"""

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.processes.served import Served, put_load, served
from penstock.bench.report import BenchReport

_REQUESTS, _QUICK_REQUESTS = 10_000, 500
_BURST, _QUICK_BURST = 500, 50
_SPEEDUP = 1000.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="mock workers (default 2)")
    parser.add_argument(
        "--frontend-processes", type=int, default=1, metavar="N", help="frontends (default 1)"
    )
    parser.add_argument("--requests", type=int, metavar="N", help=f"how many (default {_REQUESTS})")
    parser.add_argument(
        "--mock-speedup",
        type=float,
        default=_SPEEDUP,
        metavar="X",
        help=f"of the workers' clock; 1 is the modelled GPU's (default {_SPEEDUP:g}: Penstock is what is slow)",
    )
    parser.add_argument("--concurrency", type=int, default=64, metavar="C", help="at once (default 64)")
    parser.add_argument("--input-tokens", type=int, default=128, metavar="I", help="(default 128)")
    parser.add_argument("--output-tokens", type=int, default=64, metavar="O", help="(default 64)")


def run(options: argparse.Namespace) -> BenchReport:
    requests = options.requests or (_QUICK_REQUESTS if options.quick else _REQUESTS)
    load = {
        "requests": requests,
        "concurrency": options.concurrency,
        "input-tokens": options.input_tokens,
        "output-tokens": options.output_tokens,
    }
    flags = {
        "engine": "mock",
        "mock-speedup": options.mock_speedup,
        "workers": options.workers,
        "frontend-processes": options.frontend_processes,
    }
    with served(*(f"--{name}={value}" for name, value in flags.items())) as deployment:
        burst = _QUICK_BURST if options.quick else _BURST
        report = put_load(deployment, load | {"burst": burst})
    with _canned(options.output_tokens) as canned:
        limit = put_load(canned, load)
    figures = {f"mock_{name}": value for name, value in report.figures.items()}
    return BenchReport(
        name="mock",
        config={
            "workers": options.workers,
            "frontend_processes": options.frontend_processes,
            "requests": requests,
            "concurrency": options.concurrency,
            "input_tokens": options.input_tokens,
            "output_tokens": options.output_tokens,
            "mock_speedup": options.mock_speedup,
        },
        figures=figures
        | {"fraction_of_limit": figures["mock_requests_per_s"] / limit.figures["requests_per_s"]},
        samples=report.samples,
        limits={"canned_requests_per_s": limit.figures["requests_per_s"]},
        problems=[*report.problems, *limit.problems],
    )


@contextlib.contextmanager
def _canned(num_tokens: int) -> Iterator[Served]:
    command = [sys.executable, "-m", "benchmarks.processes.canned", str(num_tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Served(f"http://127.0.0.1:{int(process.stdout.readline())}", "canned")
        process.stdin.close()
