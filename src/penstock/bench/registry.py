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

from penstock.bench.report import Report
from penstock.core.errors import ConfigError

EXIT_OK = 0
EXIT_FAILED = 1


class Bench(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> Report:
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
        """Register a subcommand of `parser` for each bench."""
        names = parser.add_subparsers(metavar="NAME", required=True, parser_class=_lazy(type(parser)))
        for name, (module, text) in self.modules.items():
            bench = names.add_parser(name, help=text, description=f"Measure {text}.")
            bench.add_argument("--json", metavar="OUT", type=Path, help="write the report to this file")
            bench.add_argument("--quick", action="store_true", help="a smaller run that shows that it works")
            bench.set_defaults(bench_module=module, run=functools.partial(self._run, name))

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


def add_parsers(commands: Any) -> None:
    """Register `bench` and its subcommands."""
    BENCHES.add_names(
        commands.add_parser(
            "bench", help="measure, and write one JSON", description="Measure, and write one JSON."
        )
    )


def _bench(module: str) -> Bench:
    return cast("Bench", importlib.import_module(module))


def _lazy(kind: type[argparse.ArgumentParser]) -> type[argparse.ArgumentParser]:
    """Make a parser class that imports its bench when it parses."""

    class LazyParser(kind):  # type: ignore[valid-type,misc]
        complete = False

        def load(self) -> None:
            if not self.complete:
                self.complete = True
                _bench(self.get_default("bench_module")).add_arguments(self)

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            self.load()
            return super().parse_known_args(args, namespace)

    return LazyParser
