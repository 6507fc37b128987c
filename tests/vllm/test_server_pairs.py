"""A prefill and a decode server of stock vLLM, whose NixlConnector moves the KV: by `penstock serve` and by the router alone."""

import asyncio
import importlib.util
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tokenizers import Tokenizer

from penstock.deploy.supervisor.local import LocalDeployment
from penstock.frontend.text.detokenize import Detokenizer
from penstock.graph import Graph
from tests.vllm.servers import BLOCK, NAME, VllmServer, free_port, running_router, running_servers

TOKENS = 24
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
GATEWAY = Path(__file__).parents[2] / "examples" / "gateway.py"


@pytest.fixture(scope="module")
def chat_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template."""
    directory = tmp_path_factory.mktemp("chat") / NAME
    shutil.copytree(model_dir, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def servers(chat_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    settings = []
    for role in ("kv_producer", "kv_consumer"):
        connector = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        environment = {
            "UCX_TLS": "self,sm,tcp", "UCX_NET_DEVICES": "lo", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }  # fmt: skip
        settings.append((["--kv-transfer-config", json.dumps(connector)], environment))
    with running_servers(chat_dir, tmp_path_factory.mktemp("pair"), settings) as started:
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


def test_serve_gives_the_output_of_an_aggregated_server(servers, chat_dir):
    prefill, decode = servers
    roles = {
        "prefill": {"engine": {"name": "openai", "args": {"url": [prefill.url], "model": NAME}}},
        "decode": {"engine": {"name": "openai", "args": {"url": [decode.url], "model": NAME}}},
    }
    graph = Graph.model_validate(
        {
            "model": str(chat_dir), "served_name": NAME, "block_size": BLOCK, "frontend": {"port": 0}, "roles": roles,
            "router": {"disagg": {"local_tokens_max": 0}}, "supervision": {"spare_processes": 0},
        }
    )  # fmt: skip

    content = (chat_dir / "tokenizer.json").read_bytes()
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


def test_the_router_alone_names_the_pair(servers, chat_dir):
    prefill, decode = servers
    flags = [f"--prefill-url={prefill.url}", f"--decode-url={decode.url}", f"--kv-events={prefill.events}"]
    flags += [f"--kv-events-replay={prefill.replay}", "--set=service.router.disagg.local_tokens_max=0"]
    flags += [f"--set={role}_servers.model={NAME}" for role in ("prefill", "decode")]

    async def main() -> None:
        async with asyncio.timeout(240), aiohttp.ClientSession() as http:
            with running_router(chat_dir, *flags) as router:
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
                await gateway_chats(http, router.url, prefill, decode)

    asyncio.run(main())


async def gateway_chats(
    http: aiohttp.ClientSession, router: str, prefill: VllmServer, decode: VllmServer
) -> None:
    """Chat through the example gateway: messages are rendered by the router, and the KV moves."""
    spec = importlib.util.spec_from_file_location("gateway_example", GATEWAY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gateway = module.Gateway(router, [])
    app = web.Application()
    app.cleanup_ctx.append(gateway.connect)
    app.add_routes([web.post("/v1/chat/completions", gateway.chat)])
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    rng = random.Random(4)
    try:
        before = await moved_tokens(http, decode)
        for stream in (False, True):
            text = " ".join(rng.choice(["red", "blue", "the", "sun", "a"]) for _ in range(150))
            chat = {
                "model": NAME, "messages": [{"role": "user", "content": text}], "max_completion_tokens": 8, "temperature": 0,
                "ignore_eos": True, "stream": stream,
            }  # fmt: skip
            if stream:
                chat |= {"stream_options": {"include_usage": True}}
            said = []
            for url in (f"http://127.0.0.1:{port}", prefill.url):
                async with http.post(f"{url}/v1/chat/completions", json=chat) as answer:
                    assert answer.status == 200, await answer.text()
                    said.append(await text_of(answer))
            assert said[0] == said[1]
            assert said[0]
        assert await moved_tokens(http, decode) > before
    finally:
        await runner.cleanup()


async def text_of(answer: aiohttp.ClientResponse) -> str:
    if answer.content_type == "application/json":
        return str((await answer.json())["choices"][0]["message"]["content"])
    lines = (await answer.text()).splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
