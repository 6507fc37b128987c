"""`penstock serve`."""

import argparse
import asyncio
import json
import shlex
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from penstock.cli.parser import Parser, add_log_level, add_set, add_urls, url_settings
from penstock.core import log
from penstock.core.document import parse_yaml
from penstock.core.errors import ConfigError
from penstock.core.native import warn_if_disabled
from penstock.deploy.card import served_name
from penstock.deploy.control.hosted import DeploymentOrigin
from penstock.deploy.control.local_connector import DEFAULT_URL
from penstock.deploy.state import admin_token_path
from penstock.deploy.supervisor.local import LocalDeployment
from penstock.deploy.supervisor.local_part import LocalPart
from penstock.engine.registry import check_engine_name
from penstock.frontend.limits.keys import API_KEY_VARIABLE
from penstock.graph import DEMO_MODEL, Graph, Overrides, build, load

_DEMO_WORKERS = 2  # to show routing
_DEMO_KV_BLOCKS = 1024
"""KV blocks of a demo worker: 20 MiB, four requests of the model's full context."""
_DEMO_SPARES = 0
"""No spare process, which takes 270 MB: the demo stays below 1 GB of memory, most of it PyTorch's."""

FLAGS = {
    "--workers": ("roles.aggregated.replicas", "N", "worker processes (default 1; 2 with --demo)"),
    "--prefill": (
        "roles.prefill.replicas",
        "P",
        "prefill workers, whose KV is transferred to decode workers",
    ),
    "--decode": (
        "roles.decode.replicas",
        "D",
        "decode workers; with --prefill instead of --workers, or beside them",
    ),
    "--engine": (
        "roles.aggregated.engine",
        "NAME",
        "paged: PyTorch (default); vllm; sglang; trtllm; openai: running servers, see --url; mock: synthetic text; module:make: your own",
    ),
    "--mock-speedup": ("roles.aggregated.mock.speedup", "X", "run the mock engine's clock X times as fast"),
    "--chat-template": ("chat_template", "FILE", "Jinja file in the place of the model's chat templates"),
    "--host": ("frontend.host", "HOST", "address to listen on (default 127.0.0.1)"),
    "--port": ("frontend.port", "P", "port to listen on; 0 takes a free one (default 8000)"),
    "--api-key-file": (
        "frontend.api_key_file",
        "FILE",
        "YAML file of tenants with hashes of API keys, as `penstock key` prints them; PENSTOCK_API_KEY adds a key",
    ),
    "--frontend-processes": ("frontend.processes", "N", "processes that share the port (default 1)"),
    "--kv-host": (
        "roles.aggregated.kv.host",
        "SIZE",
        "memory of the host for KV that leaves devices, shared by its workers, as 8GiB, or 5x: five times each device's blocks",
    ),
    "--kv-disk": (
        "roles.aggregated.kv.disk",
        "PATH:SIZE",
        "files for KV that leaves the device, as /var/cache/kv:100GiB; kept across restarts",
    ),
    "--kv-object": (
        "roles.aggregated.kv.object",
        "URL[:SIZE]",
        "object store for KV that all workers share, as s3://bucket/path:1TiB or file:///mnt/kv",
    ),
    "--policy": ("router.policy", "NAME", "routing policy, such as kv or least-loaded (default kv)"),
    "--slo-ttft": ("slo.ttft_s", "S", "seconds to the first token that the planner keeps (default 2)"),
    "--slo-itl": ("slo.itl_s", "S", "mean seconds between tokens that the planner keeps (default 0.1)"),
    "--min-workers": (
        "planner.min_workers",
        "N",
        "fewest workers of each role; with it or --max-workers a planner scales them by demand (default 1)",
    ),
    "--max-workers": ("planner.max_workers", "N", "most workers of each role (default 8)"),
}
"""Flag: (path in the graph, placeholder, help). Each is short for `--set PATH=VALUE`."""


_URL_ENGINE = "openai"


def add_serve(parser: Parser) -> None:
    """Add the arguments of `penstock serve`."""
    parser.description = (
        "Serve a model on this machine: an OpenAI-compatible server, a KV-aware router, workers."
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
    for flag, (place, metavar, text) in FLAGS.items():
        parser.add_argument(flag, dest=place, metavar=metavar, help=text)
    add_set(parser, "set any field of the graph, as roles.aggregated.kv_blocks=512")
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the engine by its own name, as enforce_eager=true; may be repeated",
    )
    add_urls(parser)
    parser.add_argument(
        "--planner-dry-run", action="store_true", help="let the planner decide, and change nothing"
    )
    parser.add_argument(
        "--first-chat", action="store_true", help="send one chat when ready, and show what to try next"
    )
    add_log_level(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    graph = graph_of(options)

    log.configure(options.log_level, process="supervisor")
    warn_if_disabled()
    file = str(Path(options.graph).resolve()) if options.graph else ""
    origin = DeploymentOrigin(file=file, directory=str(Path.cwd()))
    serve(graph, origin=origin, log_level=options.log_level, first_chat=options.first_chat)
    return 0


def graph_of(options: argparse.Namespace) -> Any:
    """Build the graph from the arguments.

    Raises:
        ConfigError: the arguments contradict each other, or name no model.
    """
    if options.demo and options.model:
        raise ConfigError(f"--demo and {options.model}: serve one of them")
    overrides = Overrides(options.set)
    roles = _roles_of(options)
    for flag, (place, _, _) in FLAGS.items():
        if (value := getattr(options, place)) is not None:
            if place == "chat_template":  # a path in a graph is relative to that
                value = str(Path(value).expanduser().resolve())
            for meant in _places(place, roles):
                overrides.assign(meant, value, flag=flag)
    if options.planner_dry_run:
        overrides.assign("planner.act.dry_run", value=True, flag="--planner-dry-run")
    _assign_engine(options, overrides, roles)
    _check_workers(roles, options, overrides.assigned())
    engine = getattr(options, FLAGS["--engine"][0])
    if engine is not None:
        _check_engine(engine)
    model = DEMO_MODEL if options.demo else options.model
    if model:
        overrides.assign("model", model, flag="--demo" if options.demo else "MODEL")
    if options.graph:
        return _with_flags_used(load(options.graph, overrides), options)
    if not model and engine != "mock":
        raise ConfigError(
            "serve what? Give a model directory or hub name, --demo, --graph FILE, or --engine mock"
        )
    _check_partners(roles, options, overrides.assigned())
    data: dict[str, Any] = {"model": DEMO_MODEL, "roles": {role: {} for role in roles}}
    if options.demo:
        has_urls = any(url_settings(options))
        data["roles"] = {role: {} if has_urls else _demo_role(roles, engine) for role in roles}
        data["supervision"] = {"spare_processes": _DEMO_SPARES}
        data["frontend"] = {"page": {"kills_workers": True}}
    return _with_flags_used(build(data, overrides, source="serve"), options)


def _assign_engine(options: argparse.Namespace, overrides: Any, roles: list[str]) -> None:
    """Assign the engine's own arguments, and the running servers that are workers."""
    engine = getattr(options, FLAGS["--engine"][0])
    settings = tuple(url_settings(options))
    has_servers = options.graph or engine == _URL_ENGINE or any(name == "url" for _, name, _, _ in settings)
    for role, name, value, flag in settings:
        if not has_servers:
            raise ConfigError(f"{flag}: no running server publishes there; add --url, one for each {flag}")
        if name == "url" and engine not in {None, _URL_ENGINE}:
            raise ConfigError(
                f"{flag}: running servers are workers of engine {_URL_ENGINE}, got --engine {engine}; leave one of them out"
            )
        overrides.assign(f"roles.{role}.engine_args.{name}", value, flag=flag)
        if name == "url" and engine is None:
            overrides.assign(f"roles.{role}.engine", _URL_ENGINE, flag=flag)
    for argument in options.engine_arg:
        name, value = _engine_arg(argument)
        for meant in _places(f"roles.aggregated.engine_args.{name}", roles):
            overrides.assign(meant, value, flag="--engine-arg")


def _check_engine(name: str) -> None:
    """Check the name before the graph does, which would name a field instead of the flag; raises ConfigError."""
    try:
        check_engine_name(name)
    except ConfigError as error:
        raise ConfigError(f"--engine: {error.message}") from error


def _check_partners(roles: list[str], options: argparse.Namespace, assigned: dict[str, Any]) -> None:
    """Refuse `--prefill` alone and `--decode` alone, naming the flag that is missing.

    Args:
        roles: roles that flags ask for.
        options: the flags.
        assigned: values set by flags, by dotted path; a path below `roles.decode` also declares that role.
    """
    described = {*roles, *(path.split(".")[1] for path in assigned if path.startswith("roles."))}
    if "prefill" in described and described.isdisjoint({"decode", "aggregated"}):
        if options.prefill_urls:
            raise ConfigError("--prefill-url: no decode server would take its KV; add --decode-url")
        raise ConfigError("--prefill: no decode worker would take its KV; add --decode D")
    if "decode" in described and "prefill" not in described:
        if options.decode_urls:
            raise ConfigError("--decode-url: no prefill server would compute its prompts; add --prefill-url")
        raise ConfigError("--decode: no prefill worker would compute its prompts; add --prefill P")


def _engine_arg(argument: str) -> tuple[str, Any]:
    """Read `NAME=VALUE`; the value is YAML."""
    name, equals, value = argument.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(
            f"--engine-arg {argument}: must be NAME=VALUE, as in --engine-arg enforce_eager=true"
        )
    return name, parse_yaml(value, source=f"--engine-arg {name}", is_file=False)


def _check_workers(roles: list[str], options: argparse.Namespace, assigned: dict[str, Any]) -> None:
    """Refuse `--workers` below 1 where no other role is described, as in a graph file or by `--set`."""
    text = getattr(options, FLAGS["--workers"][0]) or ""
    others = [path for path in assigned if path.startswith(("roles.prefill", "roles.decode"))]
    is_below = text.removeprefix("-").isdecimal() and int(text) < 1
    if is_below and roles == ["aggregated"] and not others and not options.graph:
        raise ConfigError(f"--workers: must be >= 1 to serve anything, got {text}")


def _with_flags_used(graph: Any, options: argparse.Namespace) -> Any:
    """Return the graph; raises ConfigError for `--mock-speedup` without a mock engine, and `--slo-…` without a planner."""
    for flag in ("--slo-ttft", "--slo-itl"):
        value = getattr(options, FLAGS[flag][0])
        if value is not None and graph.planner is None:
            raise ConfigError(
                f"{flag} {value}: only the planner keeps a target; add --max-workers N, to let it scale up to N workers"
            )
    speedup = getattr(options, FLAGS["--mock-speedup"][0])
    engines = sorted({spec.engine for spec in graph.roles.present().values()})
    if speedup is not None and "mock" not in engines:
        raise ConfigError(
            f"--mock-speedup {speedup}: only with --engine mock, but the engine is {' and '.join(engines)}"
        )
    return graph


def _demo_role(roles: list[str], engine: str | None) -> dict[str, Any]:
    """Give the defaults of each demo role."""
    kv = {} if engine == "mock" else {"kv_blocks": _DEMO_KV_BLOCKS}
    return {"replicas": _DEMO_WORKERS, **kv} if roles == ["aggregated"] else kv


def _roles_of(options: argparse.Namespace) -> list[str]:
    """List the roles that flags declare."""
    asked = [role for role in ("prefill", "decode") if _asks_for(options, role)]
    if not asked or _asks_for(options, "aggregated"):
        return ["aggregated", *asked]
    return asked


def _asks_for(options: argparse.Namespace, role: str) -> bool:
    return getattr(options, f"roles.{role}.replicas") is not None or bool(getattr(options, f"{role}_urls"))


def _places(place: str, roles: list[str]) -> list[str]:
    """Give the paths that a flag sets: a worker setting goes to every role."""
    if place.startswith("roles.aggregated.") and not place.endswith(".replicas"):
        return [place.replace("aggregated", role, 1) for role in roles]
    return [place]


_QUESTION = "What does the router do?"


@dataclass(frozen=True, slots=True)
class TryCommands:
    """How a client of this machine reaches a deployment.

    Attributes:
        url: without a slash at the end.
        model: its name.
        asks_key: whether requests need an API key.
        has_key: whether it is the one in PENSTOCK_API_KEY; a key file has hashes only.
        certificate: of an HTTPS port, which clients trust by it; it must be for the URL's address.
        has_page: whether the URL shows the live page.
    """

    url: str
    model: str
    asks_key: bool = False
    has_key: bool = False
    certificate: Path | None = None
    has_page: bool = True

    def commands(self) -> str:
        """Name the page and the commands of a terminal."""
        flag = "" if self.url == DEFAULT_URL else f" --url {self.url}"
        page = f"{self.url}/ in a browser, " if self.has_page else ""
        return f"{page}penstock chat{flag}, penstock top{flag}"

    def curl(self) -> str:
        """Ask one question by curl; a key of a file is to be put in place of KEY."""
        body = {"model": self.model, "messages": [{"role": "user", "content": _QUESTION}]}
        json_type = "-H 'Content-Type: application/json'"
        return f"{self._curl()} {self.url}/v1/chat/completions {json_type}{self._key()} -d {shlex.quote(json.dumps(body))}"

    def more(self) -> str:
        """Name what to try after a first chat, over several lines."""
        key = '"KEY"' if self.asks_key and not self.has_key else f'os.environ["{API_KEY_VARIABLE}"]'
        load_os = "import os\n  " if self.has_key else ""
        trust = f"SSL_CERT_FILE={shlex.quote(str(self.certificate))} python" if self.certificate else "python"
        token = admin_token_path()
        return f"""
Try next, in another terminal:

  {self.curl()}

  {load_os}from openai import OpenAI          # pip install openai; {trust}
  client = OpenAI(base_url={json.dumps(self.url + "/v1")}, api_key={key if self.asks_key else '"none"'})
  question = [{{"role": "user", "content": "What is a KV cache?"}}]
  for chunk in client.chat.completions.create(model={json.dumps(self.model)}, messages=question, stream=True):
      print(chunk.choices[0].delta.content or "", end="")

  {self._curl()} -H "Authorization: Bearer $(cat {token})" {self.url}/admin/workers   # who serves, and with what load
  {self._curl()} {self.url}/metrics                 # Prometheus
"""

    def _curl(self) -> str:
        return "curl" if self.certificate is None else f"curl --cacert {shlex.quote(str(self.certificate))}"

    def _key(self) -> str:
        if not self.asks_key:
            return ""
        return (
            f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"'
            if self.has_key
            else " -H 'Authorization: Bearer KEY'"
        )


_SUPERVISOR = "supervisor"


def serve(
    graph: Graph, *, log_level: str, first_chat: bool, origin: DeploymentOrigin, part: LocalPart | None = None
) -> None:
    """Run a deployment, or this host's part of it, until a signal; a second signal cancels requests in flight.

    Raises:
        ConfigError: the graph cannot run on this machine.
        PenstockError: the deployment failed for good.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(graph, log_level=log_level, first_chat=first_chat, origin=origin, part=part))


async def _serve(
    graph: Graph, *, log_level: str, first_chat: bool, origin: DeploymentOrigin, part: LocalPart | None
) -> None:
    def say(name: str, state: str, detail: str = "") -> None:
        deployment.output.print(state_line(name, state, detail))

    deployment = LocalDeployment(graph, log_level=log_level, say=say, part=part, origin=origin)
    log.configure(log_level, process=_SUPERVISOR, stream=deployment.output.tee(_SUPERVISOR))
    stopping = _Stopping(deployment)
    try:
        async with deployment:
            stopping.is_started = True
            workers = [member.ready.is_set() for member in deployment.pool.members]
            share = "" if all(workers) else f"  {sum(workers)} of {len(workers)} workers"
            say(
                "penstock",
                "ready",
                f"{deployment.url or 'no frontend here'}  model {served_name(graph)}{share}  Ctrl-C stops",
            )
            if deployment.url:
                to_try = _to_try(deployment)
                say("penstock", "try", to_try.commands())
                if first_chat:
                    await _chat_until(stopping.requested, deployment, to_try)
                else:
                    say("penstock", "try", to_try.curl())
            await stopping.requested.wait()
            say("penstock", "stopping", "finishes requests in flight; Ctrl-C again ends them at once")
    except asyncio.CancelledError:
        if not stopping.requested.is_set():
            raise
    say("penstock", "stopped")


def _to_try(deployment: LocalDeployment) -> TryCommands:
    frontend = deployment.graph.frontend
    return TryCommands(
        url=deployment.url,
        model=served_name(deployment.graph),
        asks_key=deployment.asks_for_keys,
        has_key=deployment.asks_for_keys and deployment.api_key is not None,
        certificate=None if frontend.tls is None else Path(frontend.tls.certificate).resolve(),
        has_page=frontend.page.enabled,
    )


async def _chat_until(requested: asyncio.Event, deployment: LocalDeployment, to_try: TryCommands) -> None:
    """Send the first chat, where a key and trust in the certificate are not asked for; a signal cancels it."""
    has_no_key = to_try.asks_key and not to_try.has_key  # the file has hashes only
    if not has_no_key and to_try.certificate is None:
        chat = chat_once(to_try.url, to_try.model, deployment.api_key, write=deployment.output.print)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(chat), group.create_task(requested.wait())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
    if not requested.is_set():
        deployment.output.print(f"{to_try.more()}\n")


class _Stopping:
    """Handles SIGINT, SIGTERM and SIGHUP: during the start gives up, later drains, the second time ends at once."""

    def __init__(self, deployment: LocalDeployment) -> None:
        self.requested = asyncio.Event()
        self.is_started = False
        self._deployment = deployment
        self._task = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.requested.is_set():
            self._deployment.kill()
        self.requested.set()
        if not self.is_started and self._task is not None:
            self._task.cancel()


def state_line(name: str, state: str, detail: str = "") -> str:
    """Give the line that tells one change of state."""
    return f"{name:<11} {state:<9} {detail}".rstrip() + "\n"


QUESTION = "What is Penstock?"
_TIMEOUT_S = 120.0


async def chat_once(
    url: str, model: str, api_key: str | None = None, *, write: Callable[[str], None]
) -> None:
    """Send one question, and `write` the answer as it streams.

    A failure is written, not raised: the deployment keeps running.
    """
    write(f"\nyou> {QUESTION}\n{model}> ")
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "stream": True,
        "max_tokens": 200,
    }
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            async for line in response.content:
                write(_text_of(line))
    except (aiohttp.ClientError, TimeoutError) as error:
        write(f"(no answer: {error or type(error).__name__})")
    write("\n")


def _text_of(line: bytes) -> str:
    """Give the text in one line of the answer: a stream event, or an error's JSON."""
    data = line.removeprefix(b"data: ").strip()
    if not data.startswith(b"{"):
        return ""
    event = msgspec.json.decode(data)
    if "error" in event:
        return f"(no answer: {event['error']['message']})"
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
