"""`penstock router`."""

import argparse
import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

import pydantic
import uvloop
from prometheus_client import CollectorRegistry

from penstock.cli.parser import Parser, add_log_level, add_set, add_urls, url_settings
from penstock.cli.serve import state_line
from penstock.core import log
from penstock.core.config import wrong
from penstock.core.errors import ConfigError
from penstock.core.listening import Address
from penstock.core.types.instances import Role
from penstock.deploy.identity import location_here
from penstock.deploy.processes.watched_server import Say, WatchedServers
from penstock.deploy.supervisor.output import ProcessOutput
from penstock.engine.openai.config import ServerConfig
from penstock.engine.paged.checkpoint import Checkpoint
from penstock.frontend.config import EndpointPickerConfig
from penstock.frontend.endpoint_picker.exchange import EndpointPicker
from penstock.frontend.endpoint_picker.pool import PoolServers
from penstock.frontend.http.router import RoutingHttpConfig, RoutingServer
from penstock.frontend.limits.admission import ReceiveBudget
from penstock.frontend.limits.tenants import ApiAccess, TenantKeys
from penstock.frontend.route_query import RouteModel
from penstock.graph import Overrides
from penstock.router.config import DisaggConfig
from penstock.router.routing_service import RoutingService
from penstock.router.servers import ANY_LENGTH
from penstock.runtime.kubernetes import KubernetesAccess, KubernetesClient

_FLAGS = {
    "--host": ("host", "HOST", "address to listen on (default 127.0.0.1)"),
    "--port": ("port", "P", "port to listen on; 0 takes a free one (default 8100)"),
    "--api-key-file": (
        "api_key_file",
        "FILE",
        "YAML file of tenants with hashes of API keys, as `penstock key` prints them; PENSTOCK_API_KEY adds a key",
    ),
    "--pool": ("pool", "NAME", "InferencePool of Kubernetes whose ready pods serve MODEL, instead of --url"),
    "--endpoint-picker-port": (
        "endpoint_picker.port",
        "P",
        "port where Envoy asks for endpoints over gRPC, as inference gateways of Kubernetes do (usually 9002; default: none)",
    ),
    "--policy": ("service.router.policy", "NAME", "routing policy (default kv)"),
    "--block-size": ("service.block_size", "N", "tokens in a block of the servers' caches (default 16)"),
}
_SERVERS = {"aggregated": "servers", "prefill": "prefill_servers", "decode": "decode_servers"}
"""Role: field of the settings."""


def add_router(parser: Parser) -> None:
    """Add the arguments of `penstock router`."""
    parser.description = (
        "Run the standalone router: an HTTP service that chooses a server for each request of another gateway."
        " See docs/router.md."
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="of the running servers: a checkpoint's directory, or a hub name; needed with --url and --pool",
    )
    add_urls(parser)
    for flag, (place, metavar, text) in _FLAGS.items():
        parser.add_argument(flag, dest=place, metavar=metavar, help=text)
    add_set(parser, "set any other field, as service.router.predicted_s=60")
    add_log_level(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:

    overrides = Overrides(options.set)
    for flag, (place, _, _) in _FLAGS.items():
        if (value := getattr(options, place)) is not None:
            overrides.assign(place, value, flag=flag)
    for role, name, value, flag in url_settings(options):
        overrides.assign(f"{_SERVERS[role]}.{name}", value, flag=flag)
    if options.model is not None:
        overrides.assign("model", options.model, flag="MODEL")
    data = overrides.apply({})
    config = RouterCommandConfig.parse(data, source=lambda path: overrides.source_of(path, "router"))
    run_router(config, log_level=options.log_level, output=ProcessOutput())
    return 0


_KUBERNETES_TIMEOUT_S = 10.0


class RouterCommandConfig(RoutingHttpConfig):
    """Settings of `penstock router`."""

    model: str | None = pydantic.Field(default=None, min_length=1)
    """Model of the running servers: a directory or a hub name, of which only the small files are downloaded. Gateways ask for it by the hub name, or the directory's last part."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters of the running servers, each a model to ask for."""
    servers: ServerConfig | None = None
    """Running servers, as the `args` of engine `openai`; None: only those that the gateway puts."""
    prefill_servers: ServerConfig | None = None
    """Running servers that compute prompts for the others."""
    decode_servers: ServerConfig | None = None
    """Running servers that answer with KV of prefill servers."""

    pool: str | None = pydantic.Field(default=None, min_length=1)
    """InferencePool of Kubernetes whose ready pods are servers of MODEL, in this pod's namespace or that of the kubeconfig."""
    endpoint_picker: EndpointPickerConfig | None = None
    """Port where Envoy asks for endpoints, as an inference gateway of Kubernetes does; None: there is none."""

    @property
    def roles(self) -> dict[Role, ServerConfig]:
        """The running servers by role."""
        given = {
            Role.AGGREGATED: self.servers,
            Role.PREFILL: self.prefill_servers,
            Role.DECODE: self.decode_servers,
        }
        return {role: config for role, config in given.items() if config is not None}

    @pydantic.model_validator(mode="after")
    def _check_servers(self) -> Self:
        roles = self.roles
        if bool(roles) + (self.pool is not None) != (self.model is not None):
            raise wrong(
                "MODEL and either --url or --pool need each other: the servers' model, and where they answer"
            )
        if Role.PREFILL in roles and len(roles) == 1:
            raise wrong("--prefill-url: no decode server would take its KV; add --decode-url")
        if Role.DECODE in roles and Role.PREFILL not in roles:
            raise wrong("--decode-url: no prefill server would compute its prompts; add --prefill-url")
        if Role.PREFILL in roles and self.endpoint_picker is not None:
            raise wrong(
                "endpoint_picker: Envoy sends a request to one endpoint, not to a prefill and a decode server; leave out --prefill-url"
            )
        urls = [url for config in roles.values() for url in config.url]
        for url in urls:
            if urls.count(url) > 1:
                raise wrong(f"{url} is named for two roles; a server has one")
        if Role.PREFILL not in roles and self.service.router.disagg != DisaggConfig():
            raise wrong("service.router.disagg: has no effect without --prefill-url; leave it out")
        return self


def run_router(config: RouterCommandConfig, *, log_level: str, output: ProcessOutput) -> None:
    """Serve until SIGINT or SIGTERM, and print changes of state and the log to `output`.

    Raises:
        ConfigError: the address cannot be listened on, or the model of the running servers cannot be read.
    """

    def say(name: str, state: str, detail: str = "") -> None:
        output.print(state_line(name, state, detail))

    log.configure(log_level, process="router", stream=output.tee("router"))
    with output, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, say))


async def _serve(config: RouterCommandConfig, say: Say) -> None:
    requested = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, requested.set)
    registry = CollectorRegistry()
    router = config.service.router
    router = router.model_copy(update={"location": location_here(router.location)})
    service_config = config.service.model_copy(update={"router": router})
    async with (
        RoutingService(rng=random.Random(), config=service_config, registry=registry) as service,
        _watching(service, config, say) as model,
        asyncio.TaskGroup() as group,
    ):
        tenants = TenantKeys.read(config.api_key_file)
        server = RoutingServer(service, config, registry, ApiAccess(tenants=tenants), model=model)
        host, port = await server.start()
        watching = group.create_task(tenants.watch())
        if not tenants.ask_for_keys and not Address(host=host).is_local:
            say(
                "router",
                "warning",
                f"{host} port {port} answers whoever reaches it: no API key is set; give --api-key-file or PENSTOCK_API_KEY",
            )
        try:
            say(
                "router",
                "ready",
                f"http://{host}:{port}  policy {config.service.router.policy}  Ctrl-C stops",
            )
            async with _picking(service, config, model, server.budget, say):
                await requested.wait()
        finally:
            watching.cancel()
            await server.close()
    say("router", "stopped")


@asynccontextmanager
async def _picking(
    service: RoutingService,
    config: RouterCommandConfig,
    model: RouteModel | None,
    budget: ReceiveBudget,
    say: Say,
) -> AsyncIterator[None]:
    """Pick endpoints for Envoy, where the settings say so.

    Raises:
        ConfigError: it cannot listen, or what it needs is not installed.
    """
    settings = config.endpoint_picker
    if settings is None:
        yield
        return
    try:
        from penstock.frontend.endpoint_picker.server import EndpointPickerServer  # noqa: PLC0415 - an extra's
    except ImportError as error:
        raise ConfigError(
            f"endpoint_picker: {error.name} is not installed: pip install 'penstock-llm[gateway]'"
        ) from error
    picker = EndpointPicker(
        service, model, body_bytes_max=config.body_bytes_max, body_timeout_s=settings.body_timeout_s
    )
    server = EndpointPickerServer(picker, settings, budget)
    host, port = await server.start()
    say(
        "router",
        "picking",
        f"endpoints for Envoy at {host}:{port}{'' if settings.tls is None else ', with TLS'}",
    )
    try:
        yield
    finally:
        await server.close()


@asynccontextmanager
async def _watching(
    service: RoutingService, config: RouterCommandConfig, say: Say
) -> AsyncIterator[RouteModel | None]:
    """Watch the running servers, if there are any, and give their model."""
    if config.model is None:
        yield None
        return
    model, model_dir = await asyncio.to_thread(_find_model, config.model)
    names = (model, *config.adapters)
    route_model = await asyncio.to_thread(RouteModel.open, str(model_dir), names, ANY_LENGTH)
    async with AsyncExitStack() as stack:
        if config.pool is None:
            running = WatchedServers(
                service, config.roles, model=model, model_dir=model_dir, adapters=config.adapters, say=say
            ).run()
        else:
            client = await stack.enter_async_context(
                KubernetesClient(KubernetesAccess.find(), timeout_s=_KUBERNETES_TIMEOUT_S)
            )
            running = PoolServers(
                service, client, pool=config.pool, model=model, adapters=config.adapters, rng=random.Random()
            ).run()
        group = await stack.enter_async_context(asyncio.TaskGroup())
        watching = group.create_task(running, name="servers")
        try:
            yield route_model
        finally:
            watching.cancel()


def _find_model(model: str) -> tuple[str, Path]:
    """Give a model's name for gateways and its directory; a hub name is downloaded, without weights.

    Raises:
        ConfigError: it does not exist.
    """
    directory = Checkpoint.open(model, weights=False).path
    return directory.resolve().name if Path(model).expanduser().is_dir() else model, directory
