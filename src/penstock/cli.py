"""The `penstock` command. A mistake of the caller is one line on stderr and exit code 2, never a traceback.

What a subcommand needs is imported when it runs, so that `penstock --help` answers at once.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from penstock import __version__
from penstock.core.errors import ConfigError, PenstockError

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130

_DEMO_WORKERS = 2  # so that there is something to route between

_SERVE_FLAGS = {
    "--workers": ("roles.aggregated.replicas", "N", "worker processes (default 1; 2 with --demo)"),
    "--prefill": (
        "roles.prefill.replicas",
        "P",
        "prefill workers, which hand prompts over to decode workers",
    ),
    "--decode": (
        "roles.decode.replicas",
        "D",
        "decode workers; with --prefill instead of --workers, or beside them",
    ),
    "--engine": ("roles.aggregated.engine", "NAME", "paged: PyTorch (default); mock: made-up text, no model"),
    "--mock-speedup": ("roles.aggregated.mock.speedup", "X", "run the mock engine's clock X times as fast"),
    "--host": ("frontend.host", "HOST", "address to listen on (default 127.0.0.1)"),
    "--port": ("frontend.port", "P", "port to listen on; 0 takes a free one (default 8000)"),
    "--frontend-processes": ("frontend.processes", "N", "processes that share the port (default 1)"),
    "--policy": ("router.policy", "NAME", "how a worker is chosen, such as kv or least-loaded (default kv)"),
}
"""Flag: place in the graph, placeholder, help. Each is a short way to write `--set PLACE=VALUE`."""

_ROUTER_FLAGS = {
    "--host": ("host", "HOST", "address to listen on (default 127.0.0.1)"),
    "--port": ("port", "P", "port to listen on; 0 takes a free one (default 8100)"),
    "--policy": ("service.router.policy", "NAME", "how a server is chosen (default kv)"),
    "--block-size": ("service.block_size", "N", "tokens in a block of the servers' caches (default 16)"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
    except ConfigError as error:
        return _complain(error, EXIT_WRONG_INPUT)
    except PenstockError as error:
        return _complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _complain(error: PenstockError, code: int) -> int:
    for line in error.message.splitlines():
        print(f"penstock: {line}", file=sys.stderr)  # noqa: T201 - what a command is for
    return code


def _parser() -> "_Parser":
    from penstock.bench import add_parsers  # noqa: PLC0415 - see above

    parser = _Parser(
        prog="penstock", description="Serve large language models on many machines as if they were one."
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_router(commands)
    _add_explain(commands)
    _add_role(commands)
    _add_graph(commands)
    _add_simulate(commands)
    _add_plan(commands)
    _add_profile(commands)
    _add_doctor(commands)
    add_parsers(commands)
    return parser


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model on this machine",
        description="Serve a model on this machine: an OpenAI-compatible server, a KV-aware router, workers.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a checkpoint's directory, or a hub name such as Qwen/Qwen3-0.6B",
    )
    parser.add_argument("--demo", action="store_true", help="serve the small model that comes with Penstock")
    parser.add_argument(
        "--graph", metavar="FILE", help="start from a deployment graph; other flags override it"
    )
    for flag, (place, metavar, text) in _SERVE_FLAGS.items():
        parser.add_argument(flag, dest=place, metavar=metavar, help=text)
    _add_set(parser, "set any field of the graph, as roles.aggregated.kv_blocks=512")
    parser.add_argument(
        "--first-chat", action="store_true", help="send one chat when ready, and show what to try next"
    )
    _add_log_level(parser)
    parser.set_defaults(run=_serve)


def _add_set(parser: Any, text: str) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="K=V", help=text)


def _add_log_level(parser: Any) -> None:
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="log on stderr (default warning); debug has each routing decision, for `penstock explain --replay`",
    )


def _serve(options: argparse.Namespace) -> int:
    graph = _graph_of(options)
    from penstock.core import log  # noqa: PLC0415
    from penstock.core.native import warn_if_disabled  # noqa: PLC0415
    from penstock.deploy.serve import serve  # noqa: PLC0415

    log.configure(options.log_level, process="supervisor")
    warn_if_disabled()
    serve(graph, log_level=options.log_level, first_chat=options.first_chat)
    return 0


def _graph_of(options: argparse.Namespace) -> Any:
    from penstock.core.config import nearest  # noqa: PLC0415
    from penstock.engine.registry import engine_names  # noqa: PLC0415
    from penstock.graph import DEMO_MODEL, Overrides, build, load  # noqa: PLC0415

    if options.demo and options.model:
        raise ConfigError(f"--demo and {options.model}: serve one of them")
    overrides = Overrides(options.set)
    roles = _roles_of(options)
    for flag, (place, _, _) in _SERVE_FLAGS.items():
        if (value := getattr(options, place)) is not None:
            for meant in _places(place, roles):
                overrides.assign(meant, value, flag=flag)
    engine = getattr(options, _SERVE_FLAGS["--engine"][0])
    if engine is not None and engine not in engine_names():
        raise ConfigError(f"--engine: unknown {engine!r}{nearest(engine, list(engine_names()))}")
    model = DEMO_MODEL if options.demo else options.model
    if model:
        overrides.assign("model", model, flag="--demo" if options.demo else "MODEL")
    if options.graph:
        return load(options.graph, overrides)
    if not model and engine != "mock":
        raise ConfigError(
            "serve what? Give a model directory or hub name, --demo, --graph FILE, or --engine mock"
        )
    data: dict[str, Any] = {"model": DEMO_MODEL, "roles": {role: {} for role in roles}}
    if options.demo and roles == ["aggregated"]:
        data["roles"] = {"aggregated": {"replicas": _DEMO_WORKERS}}
    return build(data, overrides, source="serve")


def _roles_of(options: argparse.Namespace) -> list[str]:
    """Name the roles that the flags ask for."""
    asked = [role for role in ("prefill", "decode") if getattr(options, f"roles.{role}.replicas") is not None]
    if not asked or getattr(options, "roles.aggregated.replicas") is not None:
        return ["aggregated", *asked]
    return asked


def _places(place: str, roles: list[str]) -> list[str]:
    """Say where a flag's value goes: what describes a worker, to every role."""
    if place.startswith("roles.aggregated.") and not place.endswith(".replicas"):
        return [place.replace("aggregated", role, 1) for role in roles]
    return [place]


def _add_router(commands: Any) -> None:
    parser = commands.add_parser(
        "router",
        help="run the router alone, for other gateways",
        description="Run the router alone: an HTTP service that names a server for each request of another gateway."
        " See docs/router.md.",
    )
    for flag, (place, metavar, text) in _ROUTER_FLAGS.items():
        parser.add_argument(flag, dest=place, metavar=metavar, help=text)
    _add_set(parser, "set any other field, as service.router.predicted_s=60")
    _add_log_level(parser)
    parser.set_defaults(run=_router)


def _router(options: argparse.Namespace) -> int:
    from penstock.core import log  # noqa: PLC0415
    from penstock.deploy.router_command import run_router  # noqa: PLC0415
    from penstock.frontend.routing_http import RoutingHttpConfig  # noqa: PLC0415
    from penstock.graph import Overrides  # noqa: PLC0415

    overrides = Overrides(options.set)
    for flag, (place, _, _) in _ROUTER_FLAGS.items():
        if (value := getattr(options, place)) is not None:
            overrides.assign(place, value, flag=flag)
    data = overrides.apply({})
    config = RoutingHttpConfig.parse(data, source=lambda path: overrides.source_of(path, "router"))
    log.configure(options.log_level, process="router")
    run_router(config)
    return 0


def _add_explain(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="say why requests went where they did",
        description="Say why a running server sent a request where it did, or the latest ones; or make the decisions of a"
        " log again. See docs/routing.md.",
        epilog="Exit code of --replay without --policy: 1 if a decision differs.",
    )
    add = parser.add_argument
    add("request_id", nargs="?", metavar="REQUEST_ID", help="the answer's id, such as chatcmpl-0123")
    add(
        "--url",
        default="http://127.0.0.1:8000",
        help="of `penstock serve` or `penstock router` (default http://127.0.0.1:8000)",
    )
    add(
        "--last",
        type=int,
        metavar="N",
        help="without a request: so many of the latest decisions (default 16, at most 64) of the process that answers",
    )
    add("--json", action="store_true", help="print what the server says as it says it")
    add(
        "--replay",
        type=Path,
        metavar="FILE",
        help="a log written with --log-level debug and PENSTOCK_LOG_FORMAT=json",
    )
    add(
        "--policy",
        metavar="NAME",
        help="for --replay: decide by this policy instead (default: that of the log)",
    )
    parser.set_defaults(run=_explain)


def _explain(options: argparse.Namespace) -> int:
    from penstock.deploy.explain_command import ask, replay  # noqa: PLC0415
    from penstock.frontend.explaining import LATEST_MAX  # noqa: PLC0415

    if options.replay is None:
        if options.policy is not None:
            raise ConfigError(
                "--policy: is for --replay FILE, which decides again; what runs has decided already"
            )
        if options.request_id is not None and options.last is not None:
            raise ConfigError(f"{options.request_id} and --last: explain one request, or the latest ones")
        if options.request_id == "":
            raise ConfigError("REQUEST_ID: must be an answer's id, such as chatcmpl-0123, got ''")
        if options.last is not None and not 1 <= options.last <= LATEST_MAX:
            raise ConfigError(f"--last: must be 1 to {LATEST_MAX}, got {options.last}")
        ask(options.url, options.request_id, options.last, as_json=options.json)
        return 0
    if options.request_id is not None:
        raise ConfigError(f"{options.request_id} and --replay: explain one request, or replay a log")
    if options.last is not None or options.json:
        flag = "--json" if options.last is None else "--last"
        raise ConfigError(f"{flag}: is for what a server says; --replay makes all decisions of its log again")
    return replay(options.replay, options.policy)


def _add_role(commands: Any) -> None:
    parser = commands.add_parser(
        "role",
        help="change the role of a worker that runs",
        description="Have a worker of a running deployment become a prefill, decode or aggregated one, with what it has"
        " loaded: it finishes what it has, within worker.drain_timeout_s, and comes back. See docs/disaggregation.md.",
    )
    parser.add_argument("worker", metavar="WORKER", help="its name in GET /admin/workers, such as prefill-1")
    parser.add_argument("role", metavar="ROLE", help="prefill, decode or aggregated")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="of `penstock serve` (default http://127.0.0.1:8000)"
    )
    parser.set_defaults(run=_role)


def _role(options: argparse.Namespace) -> int:
    from penstock.core.config import nearest  # noqa: PLC0415
    from penstock.core.types import Role  # noqa: PLC0415
    from penstock.deploy.role_command import run_role  # noqa: PLC0415

    known = [role.value for role in Role]
    if options.role not in known:
        raise ConfigError(
            f"ROLE: must be {', '.join(known[:-1])} or {known[-1]}, got {options.role!r}{nearest(options.role, known)}"
        )
    run_role(options.url, options.worker, Role(options.role))
    return 0


def _add_graph(commands: Any) -> None:
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
    _add_set(check, "set a field, as for serve")
    check.set_defaults(run=_check_graph)


def _check_graph(options: argparse.Namespace) -> int:
    from penstock.deploy.local import runnable_roles  # noqa: PLC0415
    from penstock.graph import Overrides, load  # noqa: PLC0415
    from penstock.sim.deployment import simulated_roles  # noqa: PLC0415

    graph = load(options.file, Overrides(options.set))
    roles = ", ".join(
        f"{spec.replicas} {role} ({spec.engine})" for role, spec in graph.roles.present().items()
    )
    print(f"{options.file}: valid: {graph.model}, {roles}, frontend on port {graph.frontend.port}")  # noqa: T201
    for command, find_role in (("serve", runnable_roles), ("simulate", simulated_roles)):
        try:
            find_role(graph)
        except ConfigError as error:
            print(f"{options.file}: but not for penstock {command}: {error.message}")  # noqa: T201
    return 0


def _add_simulate(commands: Any) -> None:
    from penstock.sim.arguments import add_arguments  # noqa: PLC0415

    parser = commands.add_parser(
        "simulate",
        help="play a workload on a simulated deployment",
        description="Play a workload on a simulated deployment: the real router and workers, on virtual time.",
        epilog="Exit code: 0 simulated, 1 no request completed, 2 wrong input, 130 interrupted. See docs/simulation.md.",
    )
    add_arguments(parser)
    _add_set(parser, "set a field of the graph, as for serve")
    parser.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    from penstock.core import log  # noqa: PLC0415
    from penstock.sim.command import run_command  # noqa: PLC0415

    log.configure("error", process="simulate")
    return run_command(options)


def _add_plan(commands: Any) -> None:
    from penstock.plan.arguments import add_arguments  # noqa: PLC0415

    parser = commands.add_parser(
        "plan",
        help="find the deployment that serves most within latency targets",
        description="Find what to make of so many devices: whole requests or prefill and decode apart, how spread, how many"
        " workers, how large steps. Searched by the latency model, confirmed by the simulator.",
        epilog="Exit code: 0 planned, 2 wrong input, or nothing fits or keeps the targets. See docs/plan.md.",
    )
    add_arguments(parser)
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    from penstock.plan.command import run_command  # noqa: PLC0415

    return run_command(options)


def _add_profile(commands: Any) -> None:
    from penstock.bench.profiling.arguments import add_arguments  # noqa: PLC0415

    parser = commands.add_parser(
        "profile",
        help="measure an engine, and fit the latency model to it",
        description="Measure an engine in this process, or an OpenAI-compatible endpoint by URL, and fit the latency"
        " model that the router and the simulator price by.",
    )
    add_arguments(parser)
    _add_set(parser, "set a field of the engine, as for serve")
    parser.set_defaults(run=_profile)


def _profile(options: argparse.Namespace) -> int:
    from penstock.bench.profiling.command import run_command  # noqa: PLC0415
    from penstock.core import log  # noqa: PLC0415

    log.configure("critical", process="profile")
    return run_command(options)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say how memory can be moved here, and how fast",
        description="Try every transport between every two kinds of memory, within a process and between two, say why others"
        " do not work, and which settings of this host stand in the way. Takes about 10 s.",
        epilog="Exit code: 0, or 1 if a transfer failed that should work. See docs/transfer.md.",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all findings to this file too")
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="where files are tried, 64 MB for a moment (default: the directory for temporary files)",
    )
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from penstock.bench.doctor.command import run_command  # noqa: PLC0415
    from penstock.core import log  # noqa: PLC0415

    log.configure("error", process="doctor")
    return run_command(options.json, options.directory)


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, and names the nearest flag."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        options, unknown = super().parse_known_args(args, namespace)
        if not unknown:
            return options, unknown
        from penstock.core.config import nearest  # noqa: PLC0415

        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        hint = nearest(word, [flag for flag in self._option_string_actions if flag.startswith("--")])
        raise ConfigError(f"{self.prog}: unknown flag {word}{hint}")
