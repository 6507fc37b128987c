"""Two running vLLM servers as workers: equal tokens, exact prefixes, and a stream that survives the end of its server."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from penstock.deploy.supervisor.local import LocalDeployment
from penstock.frontend.text.tokens import Detokenizer
from penstock.graph import Graph
from tests.vllm.servers import BLOCK, NAME, RouterProcess, VllmServer, running_router, running_servers


@pytest.fixture(scope="module")
def servers(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    with running_servers(model_dir, tmp_path_factory.mktemp("servers"), [((), {}), ((), {})]) as started:
        yield started


class Site:
    """A deployment in front of the servers."""

    def __init__(
        self, deployment: LocalDeployment, http: aiohttp.ClientSession, detokenizer: Detokenizer
    ) -> None:
        self.url = deployment.url
        self._http = http
        self._detokenizer = detokenizer
        self._headers = {"Authorization": f"Bearer {deployment.admin_token}"}

    def _body(self, prompt: list[int], count: int, **fields: Any) -> dict[str, Any]:
        return {
            "model": NAME, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
        } | fields  # fmt: skip

    async def direct(self, server: VllmServer, prompt: list[int], count: int) -> str:
        """Ask a server itself, and detokenize as Penstock does: vLLM shows broken characters its own way."""
        body = self._body(prompt, count, return_token_ids=True)
        async with self._http.post(f"{server.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            token_ids = (await response.json())["choices"][0]["token_ids"]
        decoder = self._detokenizer.stream(begins_text=False)
        return decoder.feed(token_ids) + decoder.finish()

    async def stream(
        self, prompt: list[int], count: int, on_chunk: Any = lambda _number: None
    ) -> tuple[str, Any]:
        text, usage, number = "", None, 0
        body = self._body(prompt, count, stream=True, stream_options={"include_usage": True})
        async with self._http.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    text += "".join(choice["text"] for choice in chunk["choices"])
                    usage = chunk.get("usage") or usage
                    number += 1
                    on_chunk(number)
        return text, usage

    async def workers(self) -> dict[str, dict[str, Any]]:
        async with self._http.get(f"{self.url}/admin/workers", headers=self._headers) as response:
            return {worker["name"]: worker for worker in (await response.json())["workers"]}

    async def until(self, name: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while not holds(view := (await self.workers())[name]):  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.05)
        return view


@asynccontextmanager
async def site_of(servers: list[VllmServer], model_dir: Path, *, kv_events: bool) -> AsyncIterator[Site]:
    args: dict[str, Any] = {"url": [server.url for server in servers], "model": NAME}
    if kv_events:
        args["kv_events"] = [server.events for server in servers]
        args["kv_events_replay"] = [server.replay for server in servers]
    graph = Graph.model_validate(
        {
            "model": str(model_dir), "served_name": NAME, "block_size": BLOCK, "frontend": {"port": 0},
            "roles": {"aggregated": {"engine": {"name": "openai", "args": args}}}, "supervision": {"spare_processes": 0},
        }
    )  # fmt: skip
    content = (model_dir / "tokenizer.json").read_bytes()
    async with (
        asyncio.timeout(120),
        LocalDeployment(graph, log_level="warning", say=print) as deployment,
        aiohttp.ClientSession() as http,
    ):
        site = Site(deployment, http, Detokenizer(Tokenizer.from_buffer(content), content))
        for name in ("worker-1", "worker-2"):
            await site.until(name, lambda view: view["condition"] == "ready")
        yield site


@pytest.fixture(autouse=True)
def private_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="vs-") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        monkeypatch.setenv("PENSTOCK_STATE_DIR", str(tmp_path))
        yield


def prompt_of(number: int, length: int = 150) -> list[int]:
    return [number + 5, *((7 * index + 11) % 380 + 5 for index in range(length))]


def test_kv_events_of_other_clients_requests_lead_there(servers, model_dir):
    async def main() -> None:
        async with site_of(servers, model_dir, kv_events=True) as site:
            assert {worker["predicted"] for worker in (await site.workers()).values()} == {False}
            for number, server in enumerate(servers):
                prompt, name = prompt_of(100 + number), f"worker-{number + 1}"
                blocks = (await site.workers())[name]["indexed_blocks"] + 4
                expected = await site.direct(server, prompt, 20)
                await site.until(name, lambda view, blocks=blocks: view["indexed_blocks"] >= blocks)
                for _ in range(3):
                    text, usage = await site.stream(prompt, 20)
                    assert text == expected
                    assert usage["prompt_tokens_details"]["cached_tokens"] == 4 * BLOCK

    asyncio.run(main())


def test_the_router_alone_names_the_holder(servers, model_dir):
    """KV events are exact: whoever asked a server, the router names it, and the server finds these tokens cached."""
    flags = [f"--url={server.url}" for server in servers]
    flags += [f"--kv-events={server.events}" for server in servers]
    flags += [f"--kv-events-replay={server.replay}" for server in servers]

    async def main() -> None:
        async with aiohttp.ClientSession() as http:
            for number, server in enumerate(servers):  # before the router: replayed
                await post(http, server.url, prompt_of(200 + number))
            with running_router(model_dir, *flags, "--set", f"servers.model={NAME}") as router:
                await router.ready(http, "server-1", "server-2")
                for number, server in enumerate(servers):  # and after
                    await post(http, server.url, prompt_of(210 + number))
                assert {worker["predicted"] for worker in (await router.workers(http)).values()} == {False}
                for number in (200, 201, 210, 211):
                    prompt = prompt_of(number)
                    choice = await known(http, router, model_dir.name, prompt)
                    assert choice["url"] == servers[number % 2].url
                    usage = (await post(http, choice["url"], prompt))["usage"]
                    assert usage["prompt_tokens_details"]["cached_tokens"] == 4 * BLOCK
                    await router.ask(http, "/feedback", id=choice["id"], stage="finished")
                choice = await router.ask(http, "/route", model=model_dir.name, token_ids=prompt_of(299))
                assert choice["why"]["decisions"][0]["candidates"][0]["overlap_blocks"] == 0

    asyncio.run(main())


async def known(
    http: aiohttp.ClientSession, router: RouterProcess, model: str, prompt: list[int]
) -> dict[str, Any]:
    """Route a prompt again until its events have come and a server is known to have its four blocks."""
    async with asyncio.timeout(60):
        while True:
            choice = await router.ask(http, "/route", model=model, token_ids=prompt)
            (decision,) = choice["why"]["decisions"]
            if decision["candidates"][0]["overlap_blocks"] == 4:
                return choice
            await router.ask(http, "/feedback", id=choice["id"], stage="finished")
            await asyncio.sleep(0.05)


async def post(
    http: aiohttp.ClientSession, url: str, prompt: list[int], count: int = 4, **fields: Any
) -> dict[str, Any]:
    body = {
        "model": NAME,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
    } | fields
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()  # type: ignore[no-any-return]


def test_streams_go_on_exactly_when_their_server_is_killed(servers, model_dir):
    victim, other = servers

    async def main() -> None:
        async with site_of(servers, model_dir, kv_events=False) as site:
            prompts = [prompt_of(number) for number in range(4)]
            expected = [await site.direct(other, prompt, 200) for prompt in prompts]
            chunks = [0] * len(prompts)

            def count(index: int, number: int) -> None:
                chunks[index] = number
                if victim.process.poll() is None and sum(chunks) >= 40:  # a chunk may have several tokens
                    victim.kill()

            answers = await asyncio.gather(
                *(
                    site.stream(prompt, 200, lambda number, index=index: count(index, number))
                    for index, prompt in enumerate(prompts)
                )
            )
            assert victim.process.poll() is not None, "it was killed while streams ran"
            for (text, usage), right in zip(answers, expected, strict=True):
                assert text == right
                assert usage["completion_tokens"] == 200
            view = await site.until("worker-1", lambda view: view["condition"] == "unhealthy")
            assert view["problem"] == f"{victim.url}: no connection: connection refused"
            text, _ = await site.stream(prompts[0], 200)
            assert text == expected[0]

    asyncio.run(main())
