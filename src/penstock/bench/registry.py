"""The benches by name, and how the command line reaches them.

A bench is a module with `add_arguments(parser)` and `run(options) -> Report`. It is imported when its name is
asked for, so `penstock --help` stays quick whatever a bench imports.
"""

import argparse
import functools
import importlib
import sys
from pathlib import Path
from typing import Any, Protocol, cast

from penstock.bench.report import Report
from penstock.core.errors import ConfigError

BENCHES = {
    "cancel": "from a client's going away to its KV blocks being free",
    "deployments": "models on H100, GB200 and GB300, simulated: tokens per second, joule and dollar at latency targets",
    "disagg": "streams beside long prompts: a prefill and a decode worker against two that do both, real processes",
    "engine": "the paged engine beside a plain generate loop, in process and over HTTP",
    "hashing": "token ids into block hashes, against the Python twin",
    "mock": "the whole path but the model: requests per second through frontend, router and workers",
    "placements": "whole requests against prefill and decode apart on H100, simulated: the best of each by latency targets",
    "plan": "what `penstock plan` takes, for four models",
    "policies": "routing policies side by side, on the simulator: kv and the baselines under benchmarks/baselines",
    "pool": "a request's work in the block pool, against the Python twin",
    "profile": "how well `penstock profile` predicts the paged engine at points it was not fitted to",
    "reshard": "listing the bytes that move between workers of different tensor parallelism and layout",
    "router": "the prefix index: lookups, stored and removed blocks per second, bytes, beside a peer's",
    "routers": "several frontends beside one on the same requests, simulated: how much later first tokens come",
    "serve": "load on a running OpenAI-compatible server: latency, throughput, goodput",
    "simulate": "the simulator: requests per wall second, and where the time goes",
    "transfer": "bytes moved by every transport between two processes, beside NIXL, memcpy and fio",
}
"""Name, which is also the module in `penstock.bench`, and what it measures."""

EXIT_OK = 0
EXIT_FAILED = 1


class Bench(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> Report:
        """Measure.

        Raises:
            ConfigError: an option is wrong.
        """
        ...


def add_parsers(commands: Any) -> None:
    """Add `bench` and its names to the subcommands of `penstock`."""
    parser = commands.add_parser(
        "bench", help="measure, and write one JSON", description="Measure, and write one JSON."
    )
    names = parser.add_subparsers(metavar="NAME", required=True, parser_class=_lazy(type(parser)))
    for name, text in BENCHES.items():
        bench = names.add_parser(name, help=text, description=f"Measure {text}.")
        bench.add_argument("--json", metavar="OUT", type=Path, help="write the report to this file")
        bench.add_argument("--quick", action="store_true", help="a smaller run that shows that it works")
        bench.set_defaults(bench_name=name, run=functools.partial(_run, name))


def _bench(name: str) -> Bench:
    return cast("Bench", importlib.import_module(f"penstock.bench.{name}"))


def _run(name: str, options: argparse.Namespace) -> int:
    out: Path | None = options.json
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigError(f"--json: {out}: expected a file in a directory that exists")
    report = _bench(name).run(options)
    if out is not None:
        report.write(out)
    print(report.summary())  # noqa: T201 - what the command is for
    for problem in report.problems:
        print(f"penstock bench {name}: {problem}", file=sys.stderr)  # noqa: T201
    return EXIT_FAILED if report.problems else EXIT_OK


def _lazy(kind: type[argparse.ArgumentParser]) -> type[argparse.ArgumentParser]:
    """Make a parser class that asks its bench for the arguments when it is used."""

    class LazyParser(kind):  # type: ignore[valid-type,misc]
        complete = False

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            if not self.complete:
                self.complete = True
                _bench(self.get_default("bench_name")).add_arguments(self)
            return super().parse_known_args(args, namespace)

    return LazyParser
