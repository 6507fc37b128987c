"""What a frontend's server tells of itself, to clients, browsers and tools: listening, closing, OPTIONS, CORS, OpenAPI, version."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from frontend_site import ADMIN, HI, IDS, SPEAK, Answer, chat, http, of_keys, serving

from penstock.core.errors import ConfigError
from penstock.core.types.requests import Delta, Request
from penstock.frontend.config import FrontendConfig
from penstock.frontend.frontend import Frontend
from penstock.frontend.http.server import FrontendServer
from tests.support.dispatcher import speak


async def test_models_health_and_live() -> None:
    async with serving() as site:
        (model,) = [model async for model in site.client.models.list()]
        assert (model.id, model.owned_by, model.created) == ("tiny", "penstock", 1_700_000_000)
        assert (await site.client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await site.client.models.retrieve("some/other")
        answer = await site.ask("GET", "/health")
        assert (answer.status, json.loads(answer.body)) == (200, {"status": "ok", "models": ["tiny"]})
        site.dispatcher.cards = {}
        answer = await site.ask("GET", "/health")
        assert (answer.status, json.loads(answer.body)["reason"]) == (503, "no worker is ready")
        assert (await site.ask("GET", "/live")).status == 200


async def test_request_ids_are_echoed_or_made() -> None:
    async with serving() as site:
        assert (await site.ask("GET", "/live", b"", "X-Request-Id: mine")).headers["x-request-id"] == "mine"
        body = chat(stream=True)
        answer = await site.ask("POST", "/v1/chat/completions", body, "X-Request-Id: mine")
        assert answer.headers["x-request-id"] == "mine"
        made = {(await site.ask("GET", "/nowhere")).headers["x-request-id"] for _ in range(2)}
        made.add((await site.ask("GET", "/live", b"", "X-Request-Id: " + "x" * 500)).headers["x-request-id"])
        assert len(made) == 3


async def test_metrics_have_no_times_of_creation() -> None:
    async with serving() as site:
        await site.ask("POST", "/v1/chat/completions", chat())
        assert b"_created" not in (await site.ask("GET", "/metrics")).body


async def test_closing_lets_streams_finish_and_takes_nothing_new() -> None:
    go_on = asyncio.Event()

    async def held(request: Request) -> AsyncIterator[Delta]:
        await go_on.wait()
        async for delta in SPEAK(request):
            yield delta

    async with serving(held) as site:
        idle_reader, idle_writer = await site.connect()
        running = asyncio.ensure_future(site.ask("POST", "/v1/chat/completions", chat(stream=True)))
        await site.until(lambda: site.dispatcher.open_streams == 1)
        closing = asyncio.ensure_future(site.server.close())
        await asyncio.sleep(0.02)  # it ends listening at once
        with pytest.raises(ConnectionError):
            await site.connect()
        # A connection that was there is still answered, and then closed.
        idle_writer.write(http("GET", "/health"))
        assert Answer(await idle_reader.read()).status == 503
        idle_writer.close()
        go_on.set()
        assert b"[DONE]" in (await running).body
        await closing


@pytest.mark.parametrize("hurried", [False, True])
async def test_closing_ends_what_takes_too_long_and_says_how_long_it_waited(
    capfd: pytest.CaptureFixture[str], *, hurried: bool
) -> None:
    script = speak(IDS * 100, pause_s=3600)
    async with serving(script, drain_timeout_s=600 if hurried else 0.1) as site:
        running = asyncio.ensure_future(site.ask("POST", "/v1/chat/completions", chat()))
        await site.until(lambda: site.dispatcher.open_streams == 1)
        closing = asyncio.ensure_future(site.server.close())
        await asyncio.sleep(0)
        while hurried and not closing.done():  # until it drains there is nothing to hurry
            site.server.hurry()
            await asyncio.sleep(0.01)
        await closing
        assert "the server is shutting down" in (await running).error["message"]
    out, err = capfd.readouterr()
    (after_s,) = re.findall(r"requests_cancelled +after_s=([0-9.]+) requests=1", out + err)
    assert float(after_s) < 600 if hurried else float(after_s) >= 0.1


async def test_a_taken_port_is_one_clear_error() -> None:
    async with serving() as site:
        frontend = Frontend(FrontendConfig(port=site.port), site.dispatcher, hash_key=bytes(16))
        with pytest.raises(ConfigError, match=f"port {site.port}: Address already in use; .* --port"):
            await FrontendServer(frontend).start()


PAGE = "https://chat.example.com"


async def test_a_page_of_an_allowed_origin_may_call_the_api() -> None:
    async with serving(cors_origins=(PAGE,), tenants=of_keys("secret")) as site:
        path = "/v1/chat/completions"
        asked = await site.ask(
            "OPTIONS", path, b"", f"Origin: {PAGE}", "Access-Control-Request-Headers: authorization"
        )
        assert asked.status == 204
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert asked.headers["access-control-allow-methods"] == "OPTIONS, POST"
        assert asked.headers["access-control-allow-headers"] == "authorization"
        answer = await site.ask("POST", path, chat(), f"Origin: {PAGE}", "Authorization: Bearer secret")
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        streamed = await site.ask(
            "POST", path, chat(stream=True), f"Origin: {PAGE}", "Authorization: Bearer secret"
        )
        assert streamed.headers["access-control-allow-origin"] == PAGE


async def test_other_origins_are_not_allowed_and_none_are_by_default() -> None:
    async with serving(cors_origins=(PAGE,)) as site:
        for origin, path in (("https://evil.example", "/v1/models"), (PAGE, "/admin/workers")):
            answer = await site.ask("OPTIONS", path, b"", f"Origin: {origin}")
            assert answer.status == 204
            assert "access-control-allow-origin" not in answer.headers
    async with serving() as site:
        answer = await site.ask("OPTIONS", "/v1/models", b"", f"Origin: {PAGE}")
        assert answer.headers["allow"] == "GET, HEAD, OPTIONS"
        assert "access-control-allow-origin" not in answer.headers
        assert (await site.ask("OPTIONS", "/nowhere")).status == 404
        assert (await site.ask("HEAD", "/v1/models")).status == 200


EVIL = "evil.example"
CHAT, PLAIN = "/v1/chat/completions", "Content-Type: text/plain"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((f"Host: {EVIL}",), 403),
        ((f"Host: {EVIL}:80", f"Origin: http://{EVIL}"), 403),
        (("Host: localhost.evil.example",), 403),
        ((f"Host: localhost\r\nHost: {EVIL}",), 400),
        ((f"Origin: https://{EVIL}", PLAIN), 403),
        (("Origin: null", PLAIN), 403),
        (("Origin: http://203.0.113.5", PLAIN), 403),
    ],
)
async def test_no_page_of_another_site_reaches_a_server_on_loopback(
    headers: tuple[str, ...], status: int
) -> None:
    async with serving() as site:
        for path in ("/", "/watch/snapshot", "/v1/models", "/metrics", "/health", "/nowhere"):
            assert (await site.ask("GET", path, b"", *headers)).status == status
        assert (await site.ask("POST", CHAT, chat(), *headers)).status == status
        assert not site.dispatcher.opened


@pytest.mark.parametrize(
    ("headers", "config"),
    [
        (("Host: LocalHost:8000", "Origin: http://localhost:3000"), {}),
        (("Host: [::1]:8000", "Origin: http://127.0.0.1:3000"), {}),
        (("Host: 10.0.0.7", "Origin: http://10.0.0.7"), {}),
        (("Host: chat.localhost", "Origin: vscode-webview://x"), {}),
        (("Host: Chat.Example.com.", "Origin: https://chat.example.com"), {"hosts": ("chat.example.com",)}),
        ((f"Host: {EVIL}", f"Origin: https://{EVIL}"), {"hosts": ("*",)}),
        ((f"Origin: {PAGE}",), {"cors_origins": (PAGE,)}),
        ((f"Host: {EVIL}", f"Origin: https://{EVIL}"), {"host": "0.0.0.0"}),
    ],
)
async def test_own_pages_and_names_reach_it(headers: tuple[str, ...], config: dict[str, Any]) -> None:
    async with serving(**config) as site:
        assert (await site.ask("POST", CHAT, chat(), *headers)).status == 200


async def test_a_page_that_may_use_the_api_may_not_watch() -> None:
    async with serving(cors_origins=("*",)) as site:
        for path in ("/watch/snapshot", "/admin/workers"):
            assert (await site.ask("GET", path, b"", f"Origin: https://{EVIL}", ADMIN)).status == 403


async def test_version_ping_and_models_with_a_slash() -> None:
    async with serving() as site:
        version = json.loads((await site.ask("GET", "/version")).body)["version"]
        assert version.count(".") >= 1
        assert (await site.ask("GET", "/ping")).status == 200
        models = json.loads((await site.ask("GET", "/v1/models/")).body)
        assert models["data"][0]["display_name"] == "tiny"
        assert (models["first_id"], models["last_id"], models["has_more"]) == ("tiny", "tiny", False)


async def test_the_openapi_document_describes_the_bodies() -> None:
    async with serving() as site:
        document = json.loads((await site.ask("GET", "/openapi.json")).body)
        assert document["openapi"].startswith("3.")
        text = json.dumps(document)
        names = document["components"]["schemas"]
        assert "max_completion_tokens" in names["ChatRequest"]["properties"]
        for reference in text.split('"$ref": "#/components/schemas/')[1:]:
            assert reference.partition('"')[0] in names
        for path, operations in document["paths"].items():
            for method in operations:
                place = path.replace("{model}", "tiny").replace("{id}", "file-1")
                answer = await site.ask(method.upper(), place, b"{}")
                # without a directory for files, and no answer has this id
                stored = path.startswith(("/v1/files", "/v1/batches", "/v1/responses/"))
                assert answer.status in ({404} if stored else {200, 400}), path


async def test_the_reference_page_needs_no_network_and_no_key() -> None:
    async with serving(tenants=of_keys("secret")) as site:
        answer = await site.ask("GET", "/docs")
        assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        page = answer.body.decode()
        assert "://" not in page
        assert "<script" not in page
        document = json.loads((await site.ask("GET", "/openapi.json")).body)
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                assert f'<section id="{operation["operationId"]}"><h2><code>{method.upper()} {path}<' in page
        for name in document["components"]["schemas"]:
            assert f'<details id="type-{name}">' in page
        assert 'href="#type-ChatRequest"' in page


async def test_fields_that_clients_send_by_default_are_served() -> None:
    async with serving() as site:
        stream = await site.client.chat.completions.create(
            model="tiny",
            messages=HI,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            extra_body={"guided_json": None, "priority": 0, "use_beam_search": False, "max_tokens": 4.0},
        )
        usages = [chunk.usage async for chunk in stream]
        assert all(usage is not None for usage in usages)
        counts = [usage.completion_tokens for usage in usages]
        assert counts == sorted(counts)
        assert counts[-1] == counts[-2] > 1
        assert site.dispatcher.opened[0].sampling.max_tokens == 4
