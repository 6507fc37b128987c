"""`penstock graph`."""

import argparse
from pathlib import Path
from typing import Any

from penstock.cli.flags import add_set
from penstock.core.errors import ConfigError


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "graph", help="work with deployment graphs", description="Work with deployment graphs."
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="say whether a graph is valid",
        description="Say whether a graph is valid, every mistake in one line, and which commands of this version"
        " do not take it.",
    )
    check.add_argument("file", metavar="FILE", help="YAML, or Python that sets `graph`")
    add_set(check, "set a field, as for serve")
    check.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.deploy.card import check_model  # noqa: PLC0415
    from penstock.deploy.supervisor.local import runnable_roles  # noqa: PLC0415
    from penstock.graph import Overrides, load  # noqa: PLC0415
    from penstock.graph.partners import say_empty  # noqa: PLC0415
    from penstock.sim.deployment import simulated_roles, simulated_shape  # noqa: PLC0415

    graph = load(options.file, Overrides(options.set))
    roles = ", ".join(
        f"{spec.replicas} {role} ({spec.engine})" for role, spec in graph.roles.present().items()
    )
    print(f"{options.file}: valid: {graph.model}, {roles}, frontend on port {graph.frontend.port}")  # noqa: T201
    for line in say_empty(graph.roles):
        print(f"{options.file}: {line}")  # noqa: T201

    def check_serve() -> None:
        runnable_roles(graph)
        check_model(graph)

    def check_simulate() -> None:
        simulated_roles(graph)
        simulated_shape(graph, Path(options.file).parent)

    for command, check in (("serve", check_serve), ("simulate", check_simulate)):
        try:
            check()
        except ConfigError as error:
            print(f"{options.file}: but not for penstock {command}: {error.message}")  # noqa: T201
    return 0
