"""The `penstock` command. A usage error is one line on stderr and exit code 2, never a traceback.

Each subcommand is a module of this package, imported when its arguments are needed, so that `penstock --help` is fast.
"""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock import __version__
from penstock.cli.parser import GroupedParser, Parser
from penstock.core.errors import ConfigError, PenstockError

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}

_GROUPS = {
    "Serve": {
        "serve": ("penstock.cli.serve:add_serve", "serve a model on this machine"),
        "up": ("penstock.cli.up:add_up", "run a graph on this host, or its part of one that spans hosts"),
        "router": ("penstock.cli.router:add_router", "run the standalone router, for other gateways"),
        "key": ("penstock.cli.key:add_key", "make an API key, and the hash of it for the key file"),
        "graph": ("penstock.cli.graph:add_graph", "work with deployment graphs"),
        "render": ("penstock.cli.render:add_render", "print what runs a graph on Kubernetes or Slurm"),
    },
    "Watch": {
        "ps": ("penstock.cli.ps:add_ps", "list the deployments of this host and their processes"),
        "logs": ("penstock.cli.logs:add_logs", "show what the processes of a deployment print"),
        "top": ("penstock.cli.top:add_top", "watch a running deployment in the terminal"),
        "chat": ("penstock.cli.chat:add_chat", "chat with a served model in the terminal"),
        "explain": ("penstock.cli.explain:add_explain", "show routing decisions"),
    },
    "Operate": {
        "scale": ("penstock.cli.scale:add_scale", "show or change how many workers a role has"),
        "role": ("penstock.cli.scale:add_role", "change the role of a running worker"),
        "sleep": ("penstock.cli.scale:add_sleep", "have a running worker give up its memory"),
        "wake": ("penstock.cli.scale:add_wake", "wake a worker that sleeps"),
        "planner": ("penstock.cli.planner:add_planner", "show what the planner decided and why"),
        "kv": ("penstock.cli.kv:add_kv", "show and manage the KV caches of running workers"),
        "apply": ("penstock.cli.apply:add_apply", "change a running deployment to another graph"),
        "down": ("penstock.cli.down:add_down", "end a deployment on this host"),
        "operator": ("penstock.cli.operator:add_operator", "run the operator of a Kubernetes namespace"),
    },
    "Plan": {
        "plan": (
            "penstock.cli.offline:add_plan",
            "find the deployment with the highest request rate within latency targets",
        ),
        "simulate": ("penstock.cli.offline:add_simulate", "run a workload on a simulated deployment"),
    },
    "Measure and check": {
        "profile": ("penstock.cli.offline:add_profile", "measure an engine and fit the latency model"),
        "bench": ("penstock.cli.offline:add_bench", "measure, and write one JSON"),
        "doctor": (
            "penstock.cli.offline:add_doctor",
            "say which engines and memory transports work on this host, and how fast",
        ),
    },
    "Shell": {
        "completion": (
            "penstock.cli.completion:add_completion",
            "print a script that completes commands and flags in a shell",
        ),
    },
}
"""Title, then command in the order of `penstock --help`: (what adds its arguments, help text)."""


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
    parser = GroupedParser(
        _GROUPS,
        prog="penstock",
        description="Serve large language models on many workers behind one endpoint.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    return parser
