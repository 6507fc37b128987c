"""`penstock graph`."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from penstock.cli.arguments.flags import add_set
from penstock.core.errors import ConfigError

EXIT_NO_COMMAND = 2


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "graph", help="work with deployment graphs", description="Work with deployment graphs."
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="say which commands take a graph",
        description="Say every mistake of a graph in one line, or which of penstock serve and penstock simulate take it.",
        epilog="Exit code: 2 if the graph has a mistake, or if neither command takes it.",
    )
    check.set_defaults(run=_check)
    render = actions.add_parser(
        "render",
        help="print what each worker would be started with",
        description="Print for each worker of a graph the engine's arguments, its environment and its GPUs. Nothing is started,"
        " and neither the engine nor the model has to be here.",
        epilog="What a start finds on its machine has a name instead of a value, such as <NIXL port>. Lines with # say what"
        " is not final. Exit code: 2 if the graph has a mistake, or its engine cannot have a setting.",
    )
    render.add_argument("--json", action="store_true", help="as JSON, each worker by itself")
    render.set_defaults(run=_render)
    for action in (check, render):
        action.add_argument("file", metavar="FILE", help="YAML, or Python that sets `graph`")
        add_set(action, "set a field, as for serve")


def _render(options: argparse.Namespace) -> int:
    from penstock.deploy.commands.render import render  # noqa: PLC0415
    from penstock.graph import Overrides, load  # noqa: PLC0415

    graph = load(options.file, Overrides(options.set))
    print(render(graph, as_json=options.json), end="")  # noqa: T201
    return 0


def _check(options: argparse.Namespace) -> int:
    from penstock.deploy.commands.check import check_serve  # noqa: PLC0415
    from penstock.graph import Overrides, load  # noqa: PLC0415
    from penstock.graph.partners import say_empty, say_small_kv  # noqa: PLC0415
    from penstock.sim.break_even import say_break_even  # noqa: PLC0415
    from penstock.sim.deployment import (  # noqa: PLC0415
        hardware_hint,
        plan_deployment,
        simulated_roles,
        simulated_shape,
    )

    graph = load(options.file, Overrides(options.set))
    roles = ", ".join(
        f"{spec.replicas} {role} ({spec.engine})" for role, spec in graph.roles.present().items()
    )
    print(f"{options.file}: {graph.model}, {roles}, frontend on port {graph.frontend.port}")  # noqa: T201
    if graph.planner is not None:
        bounds = ", ".join(
            f"{least} to {most} {role}"
            for role in graph.roles.present()
            for least, most in (graph.planner.bounds(role),)
        )
        print(f"{options.file}: a planner scales {bounds}")  # noqa: T201
    for line in (*say_empty(graph.roles), *say_small_kv(graph.roles, graph.block_size)):
        print(f"{options.file}: {line}")  # noqa: T201

    def check_simulate() -> None:
        beside = Path(options.file).parent
        simulated_roles(graph)
        simulated_shape(graph, beside)
        try:
            deployment = plan_deployment(graph, beside=beside)
        except ConfigError as error:
            raise ConfigError(error.message + hardware_hint(graph, error.message)) from error
        for line in say_break_even(deployment.role_groups):
            print(f"{options.file}: {line}")  # noqa: T201

    is_taken = False
    for command, check in (("serve", partial(check_serve, graph)), ("simulate", check_simulate)):
        try:
            check()
        except ConfigError as error:
            verdict = f"refuses it: {error.message}"
        else:
            verdict, is_taken = "takes it", True
        print(f"{options.file}: penstock {command} {verdict}")  # noqa: T201
    return 0 if is_taken else EXIT_NO_COMMAND
