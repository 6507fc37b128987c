"""The running servers of the router alone, by role."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.core.types.instances import Role
from penstock.deploy.processes.watched_server import Say, WatchedServer
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.text import TextCodec
from penstock.router.service.routing_service import RoutingService


class WatchedServers:
    """Watches each server, and tells it of the gateway's feedback. One task runs it."""

    def __init__(
        self,
        service: RoutingService,
        roles: Mapping[Role, ServerConfig],
        *,
        model: str,
        model_dir: Path,
        say: Say,
        adapters: Sequence[str] = (),
    ) -> None:
        """Ask nothing yet; the arguments are those of `WatchedServer`.

        Raises:
            ConfigError: there is no tokenizer, the servers' key cannot be read, or the address of KV events is wrong.
        """
        codec = TextCodec.open(str(model_dir))
        servers = [
            WatchedServer(
                service,
                config,
                index,
                role,
                model=model,
                model_dir=model_dir,
                adapters=adapters,
                codec=codec,
                say=say,
            )
            for role, config in roles.items()
            for index in range(len(config.url))
        ]
        self._servers = {server.name: server for server in servers}
        service.open.on_end = self._request_ended

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name, server in self._servers.items():
                group.create_task(server.run(), name=name)

    def _request_ended(self, name: str, failed: bool) -> None:  # noqa: FBT001
        server = self._servers.get(name)
        if server is not None:
            server.request_ended(failed=failed)
