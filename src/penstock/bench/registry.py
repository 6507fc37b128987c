"""Benches by name, and their subcommands.

A bench is a module with `add_arguments(parser)` and `run(options) -> Report`. It is imported when used, so that
`penstock --help` is fast.
"""

import argparse
import functools
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from penstock.bench.report import BenchReport
from penstock.core.errors import ConfigError

EXIT_OK = 0
EXIT_FAILED = 1


class Bench(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> BenchReport:
        """Run the bench.

        Raises:
            ConfigError: invalid option.
        """
        ...


@dataclass(frozen=True, slots=True)
class Benches:
    """The benches of one command."""

    command: str
    """Name of the command, the prefix of its lines on stderr."""
    modules: Mapping[str, tuple[str, str]]
    """By bench name: (module, description)."""

    def add_names(self, parser: argparse.ArgumentParser) -> None:
        """Register a subcommand of `parser` for each bench.

        Args:
            parser: its class takes `loader`, which is called with a parser before it parses.
        """
        names: Any = parser.add_subparsers(metavar="NAME", required=True)
        for name, (module, text) in self.modules.items():
            loader = functools.partial(self._add_arguments, name, module)
            names.add_parser(name, help=text, description=f"Measure {text}.", loader=loader)

    def _add_arguments(self, name: str, module: str, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", metavar="OUT", type=Path, help="write the report to this file")
        parser.add_argument("--quick", action="store_true", help="a smaller run that shows that it works")
        parser.set_defaults(bench_module=module, run=functools.partial(self._run, name))
        _bench(module).add_arguments(parser)

    def _run(self, name: str, options: argparse.Namespace) -> int:
        out: Path | None = options.json
        if out is not None and (out.is_dir() or not out.parent.is_dir()):
            raise ConfigError(f"--json: {out}: expected a file in a directory that exists")
        report = _bench(options.bench_module).run(options)
        if out is not None:
            report.write(out)
        print(report.summary())  # noqa: T201 - command output
        for problem in report.problems:
            print(f"{self.command} {name}: {problem}", file=sys.stderr)  # noqa: T201
        return EXIT_FAILED if report.problems else EXIT_OK


BENCHES = Benches(
    "penstock bench",
    {
        "serve": (
            "penstock.bench.serve",
            "load on a running OpenAI-compatible server: latency, throughput, goodput",
        )
    },
)


def _bench(module: str) -> Bench:
    return cast("Bench", importlib.import_module(module))
