"""A prefill and a decode server of stock vLLM, whose NixlConnector moves the KV: by `penstock serve` and by the router alone."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from penstock.deploy.supervisor.local import LocalDeployment
from penstock.frontend.text.tokens import Detokenizer
from penstock.graph import Graph
from tests.vllm.servers import BLOCK, NAME, VllmServer, free_port, running_router, running_servers

pytestmark = pytest.mark.nightly

TOKENS = 24


@pytest.fixture(scope="module")
def named_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in a directory of the name that it is served by."""
    directory = tmp_path_factory.mktemp("named") / NAME
    shutil.copytree(model_dir, directory)
    return directory


@pytest.fixture(scope="module")
def servers(named_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    settings = []
    for role in ("kv_producer", "kv_consumer"):
        connector = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        environment = {
            "UCX_TLS": "self,sm,tcp", "UCX_NET_DEVICES": "lo", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }  # fmt: skip
        settings.append((["--kv-transfer-config", json.dumps(connector)], environment))
    with running_servers(named_dir, tmp_path_factory.mktemp("pair"), settings) as started:
        yield started


@pytest.fixture(autouse=True)
def private_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_STATE_DIR", str(tmp_path))


def prompt_of(number: int, length: int = 150) -> list[int]:
    return [number + 5, *((5 * index + 13) % 380 + 5 for index in range(length))]


async def tokens_of(
    http: aiohttp.ClientSession, url: str, prompt: list[int], **fields: Any
) -> dict[str, Any]:
    body = {
        "model": NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    } | fields  # fmt: skip
    body = {name: value for name, value in body.items() if name != "return_token_ids" or value}
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()  # type: ignore[no-any-return]


async def moved_tokens(http: aiohttp.ClientSession, server: VllmServer) -> float:
    """Give the prompt tokens whose KV came from elsewhere, as the server counts them."""
    async with http.get(f"{server.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("vllm:external_prefix_cache_hits_total")
    )


def test_serve_gives_the_output_of_an_aggregated_server(servers, named_dir):
    prefill, decode = servers
    roles = {
        "prefill": {"engine": {"name": "openai", "args": {"url": [prefill.url], "model": NAME}}},
        "decode": {"engine": {"name": "openai", "args": {"url": [decode.url], "model": NAME}}},
    }
    graph = Graph.model_validate(
        {
            "model": str(named_dir), "served_name": NAME, "block_size": BLOCK, "frontend": {"port": 0}, "roles": roles,
            "router": {"disagg": {"local_tokens_max": 0}}, "supervision": {"spare_processes": 0},
        }
    )  # fmt: skip

    content = (named_dir / "tokenizer.json").read_bytes()
    detokenizer = Detokenizer(Tokenizer.from_buffer(content), content)

    async def main() -> None:
        async with (
            asyncio.timeout(240),
            LocalDeployment(graph, log_level="warning", say=print) as deployment,
            aiohttp.ClientSession() as http,
        ):
            before = await moved_tokens(http, decode)
            for number in range(3):
                prompt = prompt_of(number)
                answer = await tokens_of(http, deployment.url, prompt, return_token_ids=None)
                assert answer["usage"]["completion_tokens"] == TOKENS
                alone = await tokens_of(http, prefill.url, prompt)  # this server computes all of it
                decoder = detokenizer.stream(begins_text=False)
                text = decoder.feed(alone["choices"][0]["token_ids"]) + decoder.finish()
                assert answer["choices"][0]["text"] == text
            assert await moved_tokens(http, decode) - before >= 3 * 4 * BLOCK

    asyncio.run(main())


def test_the_router_alone_names_the_pair(servers, named_dir):
    prefill, decode = servers
    flags = [f"--prefill-url={prefill.url}", f"--decode-url={decode.url}", f"--kv-events={prefill.events}"]
    flags += [f"--kv-events-replay={prefill.replay}", "--set=service.router.disagg.local_tokens_max=0"]
    flags += [f"--set={role}_servers.model={NAME}" for role in ("prefill", "decode")]

    async def main() -> None:
        async with asyncio.timeout(240), aiohttp.ClientSession() as http:
            with running_router(named_dir, *flags) as router:
                await router.ready(http, "prefill-1", "decode-1")
                before = await moved_tokens(http, decode)
                for number in range(10, 13):
                    prompt = prompt_of(number)
                    choice = await router.ask(http, "/route", model=NAME, token_ids=prompt)
                    first = choice["prefill"]
                    assert (first["url"], choice["url"]) == (prefill.url, decode.url)
                    answered = await tokens_of(http, first["url"], prompt, **first["fields"])
                    await router.ask(http, "/feedback", id=choice["id"], stage="prefilled")
                    copied = {name: answered[name] for name in first["from_answer"]}
                    answer = await tokens_of(
                        http, choice["url"], prompt, **choice.get("fields", {}), **copied
                    )
                    await router.ask(http, "/feedback", id=choice["id"], stage="finished")
                    alone = await tokens_of(http, prefill.url, prompt)
                    assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
                assert await moved_tokens(http, decode) - before >= 3 * 4 * BLOCK

    asyncio.run(main())
