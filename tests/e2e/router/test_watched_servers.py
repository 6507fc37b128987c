"""The router alone over running servers: it names those that serve, follows their KV events, and names prefill and decode servers as pairs."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from penstock.core.errors import RequestError
from penstock.core.types.instances import Role
from penstock.demo import MODEL_DIR
from penstock.deploy.processes.watched_server import WatchedServers
from penstock.engine.openai.config import ServerConfig
from penstock.frontend.http.router import RoutingHttpConfig, RoutingServer
from penstock.frontend.route_query import RouteModel
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.router.gateway import Query, RequestStage, ServerChoice
from penstock.router.routing_service import RoutingService, RoutingServiceConfig
from tests.support.fake_server import FakeServer
from tests.support.kv_publisher import endpoints, publishing

TIMEOUT_S = 60.0
MODEL = "penstock-demo"
TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
CHECKS = {
    "health": {"interval_s": 0.05, "timeout_s": 2.0, "retry_s_max": 0.1, "failures_max": 2},
    "load_interval_s": 0.05,
}
BLOCK = 16
PROMPT = [5 + number % 300 for number in range(150)]
LOADED = {"disagg": DisaggConfig(local_tokens_max=0)}


class Site:
    """A router over fake servers, asked over HTTP as a gateway does."""

    def __init__(self, service: RoutingService, url: str, http: aiohttp.ClientSession) -> None:
        self.service = service
        self.said: list[tuple[str, ...]] = []
        self.url = url
        self._http = http

    async def ask(self, path: str, **body: Any) -> dict[str, Any]:
        headers = {"X-Penstock-Explain": "1"}
        async with self._http.post(self.url + path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()  # type: ignore[no-any-return]

    async def route(self, **body: Any) -> dict[str, Any]:
        return await self.ask("/route", **{"model": MODEL} | body)

    async def overlap(self, **body: Any) -> tuple[str, int]:
        """Route a request and end it; return its worker, and how many blocks of it that one has."""
        choice = await self.route(**body)
        await self.ask("/feedback", id=choice["id"], stage="finished")
        return choice["worker"], choice["why"]["decisions"][0]["candidates"][0]["overlap_blocks"]

    def choose(self, *exclude: str) -> ServerChoice:
        return self.service.route(Query(model=MODEL, prompt="Hello there.", exclude=exclude))

    def view(self, name: str) -> Any:
        return next((view for view in self.service.workers() if view.name == name), None)

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():  # noqa: ASYNC110 - the fleet and sockets have no event for it
            await asyncio.sleep(0.01)

    async def ready(self, *names: str) -> None:
        conditions = {"ready", "prefill_only"}
        await self.until(
            lambda: all(
                (view := self.view(name)) is not None and view.condition in conditions for name in names
            )
        )

    async def complete(self, choice: dict[str, Any], prompt: list[int], count: int) -> list[int]:
        """Do as a gateway does: send the request to the server, or to both of a pair."""
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0, "stream": False}
        first, other = choice.get("prefill"), None
        if first is not None:
            other = asyncio.ensure_future(self.post(first["url"], asked | first["fields"]))
            if first["from_answer"]:
                answer = await other
                await self.ask("/feedback", id=choice["id"], stage="prefilled")
                asked |= {name: answer[name] for name in first["from_answer"]}
        answer = await self.post(choice["url"], asked | choice.get("fields", {}))
        if other is not None:
            await other
        return answer["tokens"]  # type: ignore[no-any-return]

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._http.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            if answer.content_type == "application/json":
                return await answer.json()  # type: ignore[no-any-return]
            text = (await answer.read()).decode()
            return {"text": text, "tokens": text.count('"finish_reason"')}


@asynccontextmanager
async def serving(
    roles: Callable[[], dict[Role, dict[str, Any]]],
    servers: list[FakeServer],
    *,
    router: dict[str, Any] | None = None,
) -> AsyncIterator[Site]:
    """Run a router over servers; `roles` is asked for their settings once they have URLs."""
    async with asyncio.timeout(TIMEOUT_S), AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        configs = {role: ServerConfig.parse(CHECKS | args, source="test") for role, args in roles().items()}
        config = RoutingServiceConfig(router=RouterConfig(**router or {}), block_size=BLOCK)
        registry = CollectorRegistry()
        service = await stack.enter_async_context(
            RoutingService(rng=random.Random(0), config=config, registry=registry)
        )
        model = RouteModel.open(str(MODEL_DIR), (MODEL, "lora"), 4096)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        front = RoutingServer(service, RoutingHttpConfig(port=0), registry, model=model)
        host, port = await front.start()
        site = Site(service, f"http://{host}:{port}", http)
        watched = WatchedServers(
            service,
            configs,
            model=MODEL,
            model_dir=MODEL_DIR,
            adapters=("lora",),
            say=lambda *words: site.said.append(words),
        )
        watching = asyncio.ensure_future(watched.run())
        try:
            yield site
            service.check()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await front.close()


# -- servers that come and go


def two_servers(**settings: Any) -> tuple[list[FakeServer], Callable[[], dict[Role, dict[str, Any]]]]:
    servers = [FakeServer(TOKENIZER), FakeServer(TOKENIZER, "sglang")]
    return servers, lambda: {Role.AGGREGATED: {"url": [server.url for server in servers]} | settings}


async def test_a_server_of_another_model_or_without_health_is_never_named():
    servers, roles = two_servers()
    servers[0].model, servers[1].health_status = "llama", 500
    async with serving(roles, servers) as site:
        await site.until(lambda: len(site.said) == 2)
        assert {name: state for name, state, _ in site.said} == {"server-1": "failed", "server-2": "failed"}
        assert "serves 'llama', expected" in next(why for name, _, why in site.said if name == "server-1")
        with pytest.raises(RequestError, match="no worker has it"):
            site.choose()
        servers[0].model = MODEL
        await site.ready("server-1")
        assert site.choose().worker == "server-1"


async def test_failures_that_the_gateway_tells_open_the_breaker_and_a_good_trial_closes_it():
    servers, roles = two_servers()
    async with serving(roles, servers) as site:
        await site.ready("server-1", "server-2")
        refuse = servers[0].refuse
        servers[0].refuse = lambda: web.json_response({"error": {"message": "no"}}, status=500)
        for stage in (RequestStage.FAILED, RequestStage.FINISHED, RequestStage.FAILED, RequestStage.FAILED):
            assert site.view("server-1").condition == "ready"
            site.service.feedback(site.choose("server-2").id, stage)
        await site.until(lambda: site.view("server-1").condition == "unhealthy")
        assert "feedback says failed (2 requests in a row failed)" in str(site.said)
        assert site.choose().worker == "server-2"
        servers[0].refuse = refuse
        await site.ready("server-1")


# -- KV events


def stored(token_ids: list[int], first: int, **fields: Any) -> dict[str, Any]:
    """A chain of blocks as vLLM and SGLang describe it; `first` numbers its hashes."""
    count = len(token_ids) // BLOCK
    return {
        "type": "BlockStored", "block_hashes": list(range(first, first + count)), "parent_block_hash": None,
        "token_ids": token_ids[: count * BLOCK], "block_size": BLOCK, "lora_id": None, "medium": "GPU",
    } | fields  # fmt: skip


@pytest.mark.parametrize("api", ["vllm", "sglang"])
async def test_requests_go_where_their_prefix_is_exactly(api: str, tmp_path: Path):
    """Whoever had a server compute the prefix, and however the prompt is told: as tokens, text or messages."""
    servers = [FakeServer(TOKENIZER, api), FakeServer(TOKENIZER, api)]
    addresses = [endpoints("tcp", tmp_path) for _ in servers]
    text = "The quick brown fox jumps over the lazy dog. " * 12
    talk = [{"role": "system", "content": text}, {"role": "user", "content": "Why?"}]
    model = RouteModel.open(str(MODEL_DIR), (MODEL,), 4096)
    # SGLang's hashes are signed, and a salt is a field of its own; vLLM's salt is an extra key of the first block.
    salted = {"cache_salt": "tenant"} if api == "sglang" else {"extra_keys": [["tenant"], *[None] * 8]}

    async with (
        serving(
            lambda: {
                Role.AGGREGATED: {
                    "url": [server.url for server in servers],
                    "kv_events": [address.endpoint for address in addresses],
                    "kv_events_replay": [address.replay_endpoint for address in addresses],
                }
            },
            servers,
        ) as site,
        publishing(addresses[0]) as first,
        publishing(addresses[1]) as second,
    ):
        await site.ready("server-1", "server-2")
        assert not site.view("server-1").predicted
        sign = -1 if api == "sglang" else 1
        await second.send(stored(PROMPT, sign * 1000))
        await first.send(stored(model.prompt(text).tolist(), 2000))
        await second.send(stored(model.chat(talk).tolist(), 3000))
        await first.send(stored(PROMPT, 4000, lora_name="lora", **({"lora_id": 1} if api == "vllm" else {})))
        await second.send(stored(PROMPT, 5000, **salted))
        total = 2 * (150 // BLOCK) + len(model.chat(talk)) // BLOCK
        await site.until(lambda: site.view("server-2").indexed_blocks == total)
        await site.until(lambda: site.view("server-1").indexed_blocks > 0)
        for _ in range(3):
            assert await site.overlap(token_ids=PROMPT) == ("server-2", 9)
            assert await site.overlap(prompt=text) == ("server-1", len(model.prompt(text)) // BLOCK)
            assert await site.overlap(messages=talk) == ("server-2", len(model.chat(talk)) // BLOCK)
            assert await site.overlap(token_ids=PROMPT, model="lora") == ("server-1", 9)
            assert await site.overlap(token_ids=PROMPT, cache_salt="tenant") == ("server-2", 9)
            assert (await site.overlap(token_ids=PROMPT, cache_salt="other"))[1] == 0
        await second.send({"type": "AllBlocksCleared"})
        await site.until(lambda: not site.view("server-2").indexed_blocks)
        assert (await site.overlap(token_ids=PROMPT))[1] == 0, "nothing is guessed of servers with events"


# -- pairs


def pair(api: str) -> list[FakeServer]:
    prefill, decode = (FakeServer(TOKENIZER, api, is_paired=True) for _ in range(2))
    prefill.rooms = decode.rooms
    return [prefill, decode]


def roles_of(servers: list[FakeServer], **prefill: Any) -> Callable[[], dict[Role, dict[str, Any]]]:
    return lambda: {
        Role.PREFILL: {"url": [servers[0].url]} | prefill,
        Role.DECODE: {"url": [servers[1].url]},
    }


async def test_a_prefill_server_that_fails_is_left_out_and_the_decode_server_computes():
    prefill, decode = servers = pair("vllm")

    async with serving(roles_of(servers), servers, router=LOADED) as site:
        await site.ready("prefill-1", "decode-1")
        prefill.health_status = 500  # it stays out once it is
        for _ in range(2):
            choice = await site.route(token_ids=PROMPT)
            if "prefill" not in choice:
                break  # a health check was first
            await site.ask("/feedback", id=choice["id"], stage="failed", worker="prefill-1")
        await site.until(lambda: site.view("prefill-1").condition == "unhealthy")
        choice = await site.route(token_ids=PROMPT)
        assert "prefill" not in choice
        assert choice["worker"] == "decode-1"
        assert await site.complete(choice, PROMPT, 3) == 3
        assert decode.pulled == []


async def test_a_pair_of_servers_that_cannot_transfer_kv_is_refused_with_the_reason():
    servers = pair("llamacpp")

    async with serving(roles_of(servers), servers) as site:
        await site.until(lambda: len(site.said) >= 2)
        assert {state for _, state, _ in site.said} == {"failed"}
        assert all("must be vLLM, SGLang or TensorRT-LLM" in why for _, _, why in site.said)


async def test_watched_servers_are_not_the_gateways_to_change():
    servers = [FakeServer(TOKENIZER)]

    async with serving(lambda: {Role.AGGREGATED: {"url": [servers[0].url]}}, servers) as site:
        await site.ready("server-1")
        async with aiohttp.ClientSession() as http:
            place = f"{site.url}/workers/server-1"
            for method in ("DELETE", "PUT"):
                async with http.request(method, place, json={"url": "http://a", "model": MODEL}) as answer:
                    assert answer.status == 409
                    assert "named with --url" in await answer.text()
        assert site.view("server-1").condition == "ready"
