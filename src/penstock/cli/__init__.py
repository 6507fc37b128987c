"""The `penstock` command. A usage error is one line on stderr and exit code 2, never a traceback.

Each subcommand imports its modules when it runs, so that `penstock --help` is fast.
"""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock import __version__
from penstock.cli import completion, doctor, graph, key, plan, profile, render, router, serve, simulate, up
from penstock.cli.arguments.grouped import GroupedParser
from penstock.cli.arguments.parser import Parser
from penstock.cli.running import chat, explain, hosted, kv, operator, planner, top, worker_changes
from penstock.core.errors import ConfigError, PenstockError

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}

_GROUPS = {
    "Serve": (serve.add, up.add, router.add, key.add, graph.add, render.add),
    "Watch": (hosted.add_watching, top.add, chat.add, explain.add),
    "Operate": (worker_changes.add, planner.add, kv.add, hosted.add_changing, operator.add),
    "Plan": (plan.add, simulate.add),
}
"""Commands by what they are for, in the order of `penstock --help`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run(make_parser, arguments)


def run(make_parser: Callable[[], Parser], arguments: Sequence[str] | None) -> int:
    """Parse the arguments, run the subcommand, and return the exit code."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - was closed by `>&-`
    sys.stderr = sys.stderr or sys.stdout
    try:
        options = make_parser().parse_args(arguments)
        code: int = options.run(options)
        sys.stdout.flush()
    except ConfigError as error:
        return _complain(error, EXIT_WRONG_INPUT)
    except PenstockError as error:
        return _complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        if not isinstance(error, BrokenPipeError) and error.errno not in _DISK_FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # `| head`; rich ends with the same code
            return EXIT_FAILED
        why = (error.strerror or str(error)).lower()
        return _complain(PenstockError(f"the output cannot be written: {why}; free space there"), EXIT_FAILED)
    return code


def _complain(error: PenstockError, code: int) -> int:
    for line in error.message.splitlines():
        print(f"penstock: {line}", file=sys.stderr)  # noqa: T201 - command output
    return code


def make_parser() -> GroupedParser:
    """Create the parser of all subcommands."""
    from penstock.bench import add_parsers  # noqa: PLC0415 - see above

    parser = GroupedParser(
        prog="penstock", description="Serve large language models on many workers behind one endpoint."
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    for title, group in _GROUPS.items():
        with parser.group(title) as commands:
            for add in group:
                add(commands)
    with parser.group("Measure and check") as commands:
        profile.add(commands)
        add_parsers(commands)
        doctor.add(commands)
    with parser.group("Shell") as commands:
        completion.adder(make_parser)(commands)
    return parser
