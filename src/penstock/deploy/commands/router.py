"""`penstock router`: the standalone router in the foreground, until Ctrl-C or SIGTERM."""

import asyncio
import random
import signal

import uvloop
from prometheus_client import CollectorRegistry

from penstock.core.net.address import Address
from penstock.deploy.commands.serve import say
from penstock.deploy.processes.location import location_here
from penstock.frontend.http.routing_http import RoutingHttpConfig, RoutingServer
from penstock.frontend.limits.access import Access, load_api_keys
from penstock.router.service.routing_service import RoutingService


def run_router(config: RoutingHttpConfig) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config))


async def _serve(config: RoutingHttpConfig) -> None:
    requested = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, requested.set)
    registry = CollectorRegistry()
    router = config.service.router
    router = router.model_copy(update={"location": location_here(router.location)})
    service_config = config.service.model_copy(update={"router": router})
    async with RoutingService(rng=random.Random(), config=service_config, registry=registry) as service:
        api_keys = load_api_keys(config.api_key_file)
        server = RoutingServer(service, config, registry, Access(api_keys=api_keys))
        host, port = await server.start()
        if not api_keys and not Address(host=host).is_local:
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
            await requested.wait()
        finally:
            await server.close()
    say("router", "stopped")
