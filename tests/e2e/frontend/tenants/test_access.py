"""Who may ask a frontend, over real sockets: API keys, and the admin token that being on this machine does not replace."""

import json
import os

import openai
import pytest
from frontend_site import ADMIN, HI, chat, of_keys, serving

ROLE = b'{"role": "decode"}'
JSON = "Content-Type: application/json"
PATHS = [
    ("GET", "/admin/workers", b""),
    ("GET", "/admin/explain", b""),
    ("GET", "/admin/explain/x", b""),
    ("POST", "/admin/workers/scripted/role", ROLE),
]


async def test_admin_asks_for_its_token_whoever_asks() -> None:
    async with serving(tenants=of_keys("a-key")) as site:
        for method, path, body in PATHS:
            for given in ("Bearer wrong", "Bearer a-key", "Bearer", "Basic the-admin-token", None):
                headers = [] if given is None else [f"Authorization: {given}"]
                answer = await site.ask(method, path, body, JSON, *headers)
                assert (answer.status, answer.error["code"]) == (401, "invalid_admin_token"), headers
                assert answer.headers["www-authenticate"] == "Bearer"
            answer = await site.ask(method, path, body, JSON, ADMIN)
            assert answer.status == 200 or answer.error["param"] == "id"


async def test_workers_are_shown_to_who_has_the_token() -> None:
    async with serving() as site:
        answer = await site.ask("GET", "/admin/workers", b"", ADMIN)
        shown = {"pid": os.getpid(), "workers": [{"name": "scripted", "models": ["tiny"]}]}
        assert json.loads(answer.body) == shown


async def test_the_api_asks_for_a_key_where_there_are_some() -> None:
    async with serving(tenants=of_keys("first", "second")) as site:
        for client_key in ("none", "firs", "first1"):
            client = site.client.with_options(api_key=client_key)
            with pytest.raises(openai.AuthenticationError) as refused:
                await client.chat.completions.create(model="tiny", messages=HI)
            assert refused.value.code == "invalid_api_key"
        for key in ("first", "second"):
            client = site.client.with_options(api_key=key)
            assert (await client.chat.completions.create(model="tiny", messages=HI)).choices
        by_header = await site.ask("POST", "/v1/chat/completions", chat(), "X-API-Key: second")
        assert by_header.status == 200, "as Anthropic's clients send it"
        assert [request.tenant for request in site.dispatcher.opened] == [
            "tenant-first", "tenant-second", "tenant-second"
        ]  # fmt: skip
        for path in ("/v1/models", "/v1/models/tiny"):
            assert (await site.ask("GET", path)).status == 401
        assert (await site.ask("POST", "/v1/completions", b"{}")).status == 401
        for path in ("/health", "/live", "/metrics"):  # probes have no keys
            assert (await site.ask("GET", path)).status == 200
