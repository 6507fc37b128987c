"""One running server as a worker of the router alone: health checks, a circuit breaker, its word of its load, its KV events."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.core.errors import PenstockError, WrongServerError
from penstock.core.types.events import AllBlocksCleared, KvEvent
from penstock.core.types.instances import Role
from penstock.engine.kv_events.translator import check_block_size
from penstock.engine.openai.apis.sglang import SglangGenerate
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.events import followed
from penstock.engine.openai.health import HealthWatch
from penstock.engine.openai.paired import has_gateway_fields, http_transfer
from penstock.engine.openai.server import EngineServer, ModelAtServer, ServerLoad, transfer_kind
from penstock.engine.openai.text import TextCodec
from penstock.router import gateway
from penstock.router.routing_service import RoutingService
from penstock.router.servers import Watched, card_of

Say = Callable[..., None]
_PREFIXES = {Role.AGGREGATED: "server", Role.PREFILL: "prefill", Role.DECODE: "decode"}


class WatchedServer:
    """Registers a server once it serves the model, and lets it get no requests while it fails. One task runs it."""

    def __init__(
        self,
        service: RoutingService,
        config: ServerConfig,
        index: int,
        role: Role,
        *,
        model: str,
        model_dir: Path,
        adapters: Sequence[str],
        codec: TextCodec,
        say: Say,
    ) -> None:
        """Ask nothing yet.

        Args:
            service: the router.
            config: where the servers are, and how to watch them.
            index: of this server in `config.url`.
            role: of the servers in `config`.
            model: the model's name, for gateways.
            model_dir: the model's directory.
            adapters: LoRA adapters that the server has.
            codec: the model's tokenizer.
            say: tells (name, state, why) to whoever started the router.

        Raises:
            ConfigError: the servers' key cannot be read, or the address of KV events is wrong.
        """
        self.name = f"{_PREFIXES[role]}-{index + 1}"
        self._service = service
        self._config = config
        self._role = role
        self._model = model
        self._adapters = tuple(adapters)
        self._say = say
        self._server = EngineServer(config.url[index], config, (model, str(model_dir)), codec, role=role)
        self._follow = followed(
            config, index, card=card_of(model, service.config.block_size), adapters=adapters
        )
        if self._follow is not None:
            self._follow(self._publish)  # refuses a wrong address before anything starts
        self._rng = random.SystemRandom()
        self._watch: HealthWatch | None = None
        self._told: str | None = None
        """What was said last of its failure."""

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                served, load = await self._until_it_serves()
                try:
                    await self._serve(served, load)
                except* PenstockError as errors:
                    await self._failed(_message(errors))
                await asyncio.sleep(self._config.health.interval_s)
        finally:
            await self._server.close()

    def request_ended(self, *, failed: bool) -> None:
        """Note the gateway's feedback on a request there."""
        if self._watch is None:
            return
        if failed:
            self._watch.request_failed("the gateway's feedback says failed")
        else:
            self._watch.request_succeeded()

    async def _until_it_serves(self) -> tuple[ModelAtServer, ServerLoad | None]:
        """Try the server until it serves the model, with back-off; say once why it does not."""
        health = self._config.health
        delay_s = health.interval_s
        while True:
            try:
                return await self._try()
            except PenstockError as error:
                await self._failed(error.message)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, max(health.retry_s_max, health.interval_s))

    async def _try(self) -> tuple[ModelAtServer, ServerLoad | None]:
        described = await self._server.check()
        await self._server.try_out(described)
        if self._role is Role.PREFILL and not has_gateway_fields(self._server.api):
            raise WrongServerError(
                f"{self._server.name}: a gateway cannot pass on what a pair of TensorRT-LLM needs; name pairs of vLLM or SGLang, or"
                " serve this one by `penstock serve --prefill-url`"
            )
        try:
            load = await self._server.load()
        except PenstockError:
            load = None  # the health check will tell
        if self._follow is not None and load is not None and load.block_size is not None:
            check_block_size(load.block_size, self._service.config.block_size)
        return described, load

    async def _serve(self, described: ModelAtServer, load: ServerLoad | None) -> None:
        """Let the server get requests, and watch it until cancelled.

        Raises:
            ExceptionGroup: of a PenstockError: the router takes no more servers, or the address of its KV events cannot be used.
        """
        problems: asyncio.Queue[str | None] = asyncio.Queue(maxsize=1)
        async with asyncio.TaskGroup() as group:
            await self._service.put(self.name, self._described(load), self._watched())
            self._told = None
            self._say(self.name, "ready", f"{self._server.url}  {described.name}")
            self._watch = HealthWatch(
                self._server,
                self._config,
                on_change=lambda problem, _is_silent: _replace(problems, problem),
                on_load=self._note_load,
            )
            group.create_task(self._watch.run())
            if self._follow is not None:
                self._publish([AllBlocksCleared()])
                group.create_task(self._follow(self._publish).run())
            while True:
                problem = await problems.get()
                await self._service.servers.note_problem(self.name, problem)
                self._say(self.name, "unhealthy" if problem else "ready", problem or "serves again")

    async def _failed(self, reason: str) -> None:
        """Let the server get no requests, and say so once."""
        self._watch = None
        with suppress(PenstockError):
            await self._service.servers.note_problem(self.name, reason)
        if reason != self._told:
            self._told = reason
            self._say(self.name, "failed", reason)

    def _described(self, load: ServerLoad | None) -> gateway.GatewayServer:
        tokens = (load and load.kv_tokens) or 0
        return gateway.GatewayServer(
            url=self._server.url,
            model=self._model,
            total_blocks=min(tokens // self._service.config.block_size, gateway.COUNT_MAX),
            adapters=self._adapters,
        )

    def _watched(self) -> Watched:
        api, is_paired = self._server.api, self._role is not Role.AGGREGATED
        return Watched(
            role=self._role,
            kv_events=self._follow is not None,
            kv_transfer_kind=transfer_kind(api) if is_paired else None,
            make_transfer=self._make_transfer if self._role is Role.PREFILL else None,
            transferred_prompts_only=is_paired and isinstance(api, SglangGenerate),
        )

    def _make_transfer(self) -> gateway.ServerKvTransfer:
        prefill, decode, from_answer = http_transfer(
            self._server.url, self._server.api, self._config, self._rng
        )
        return gateway.ServerKvTransfer(prefill=prefill, decode=decode, from_answer=from_answer)

    def _publish(self, events: Sequence[KvEvent]) -> None:
        self._service.servers.publish(self.name, events)

    def _note_load(self, load: ServerLoad) -> None:
        self._service.servers.note_load(self.name, load.running or 0, load.waiting or 0, load.kv_usage)


def _replace(problems: "asyncio.Queue[str | None]", problem: str | None) -> None:
    """Put the latest word; an older one that nobody has read counts no more."""
    if problems.full():
        problems.get_nowait()
    problems.put_nowait(problem)


def _message(errors: BaseExceptionGroup) -> str:
    """Give the text of the first error of a group."""
    first = errors.exceptions[0]
    if isinstance(first, BaseExceptionGroup):
        return _message(first)
    return first.message if isinstance(first, PenstockError) else str(first)


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
