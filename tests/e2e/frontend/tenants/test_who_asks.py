"""Who may ask a frontend and what is told of it: keys, the admin token, tenants and their limits, the access log and traces."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from frontend_site import ADMIN, HI, SPEAK, Site, chat, http, of_keys, serving

from penstock.core.errors import ConfigError
from penstock.core.types.requests import Delta, Request, TraceContext
from penstock.frontend.http.request_log import AccessLog
from penstock.frontend.limits.keys import TenantConfig, hash_of, new_key

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


CHAT = "/v1/chat/completions"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_each_request_has_one_line_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "json")
    file = tmp_path / "access.log"
    async with serving(access_log=str(file), tenants=of_keys("a")) as site:
        key = "Authorization: Bearer a"
        told = await site.ask("POST", CHAT, chat(), key, "X-Request-Id: r1", f"traceparent: {PARENT}")
        body = json.loads(told.body)
        await site.ask("POST", CHAT, chat(stream=True), key)
        await site.ask("POST", CHAT, chat(), "Authorization: Bearer wrong")
        await site.ask("POST", CHAT, chat(max_tokens=-1), key)
        await site.ask("GET", "/v1/models?key=secret", b"", key)
        await site.ask("GET", "/no%0Awhere", b"", 'X-Request-Id: a "b"')
        await site.ask("GET", "/admin/workers", b"", ADMIN)
        _, writer = await site.connect()
        writer.write(b"nonsense\r\n\r\n")
        await site.until(lambda: len(lines_of(file)) == 8)
        writer.close()
        whole, stream, wrong, bad, models, nowhere, admin, garbage = lines_of(file)
        usage = body["usage"]
        assert whole["time"].endswith("+00:00")
        assert 0 <= whole.pop("ttft_s") <= whole.pop("duration_s")
        del whole["time"]
        assert whole == {
            "status": 200, "method": "POST", "path": CHAT, "client": "127.0.0.1", "request_id": "r1", "trace_id": TRACE,
            "tenant": "tenant-a", "model": "tiny", "answer_id": body["id"], "stream": False,
            "prompt_tokens": usage["prompt_tokens"], "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "output_tokens": usage["completion_tokens"],
        }  # fmt: skip
        assert (stream["status"], stream["stream"], stream["output_tokens"]) == (
            200,
            True,
            usage["completion_tokens"],
        )
        assert "trace_id" not in stream
        assert (wrong["status"], "tenant" in wrong, "model" in wrong) == (401, False, False)
        assert (bad["status"], bad["tenant"], "model" in bad) == (400, "tenant-a", False)
        assert (models["path"], models["status"]) == ("/v1/models", 200), "a query may hold secrets"
        assert (nowhere["path"], nowhere["status"], nowhere["request_id"]) == ("/no%0Awhere", 404, 'a "b"')
        assert (admin["path"], admin["status"]) == ("/admin/workers", 200)
        assert (garbage["method"], garbage["status"]) == ("-", 400)
        (first, *_) = site.dispatcher.opened
        assert first.trace == TraceContext(request_id="r1", traceparent=PARENT)
        assert site.dispatcher.opened[1].trace is None


async def test_a_client_that_leaves_has_a_line_too_and_text_is_for_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_LOG_FORMAT", raising=False)
    file = tmp_path / "access.log"

    async def never(request: Request) -> AsyncIterator[Delta]:
        await asyncio.sleep(3600)
        async for delta in SPEAK(request):
            yield delta

    async with serving(never, access_log=str(file)) as site:
        body = chat()
        head = f'POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a "b"\r\nContent-Length: {len(body)}\r\n\r\n'
        _, writer = await site.connect()
        writer.write(head.encode() + body)
        await site.until(lambda: site.dispatcher.open_streams == 1)
        writer.transport.abort()
        await site.until(lambda: file.read_text().endswith("\n"))
        (line,) = file.read_text().splitlines()
        time, status, method, path, rest = line.split(" ", 4)
        assert (status, method, path) == ("499", "POST", CHAT)
        assert time.startswith("20")
        assert 'client=127.0.0.1 request_id="a \\"b\\"" model=tiny' in rest
        assert rest.endswith("output_tokens=0")


async def test_a_file_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    file, moved = tmp_path / "access.log", tmp_path / "access.log.1"
    async with serving(access_log=str(file)) as site:
        await site.ask("GET", "/live")
        file.rename(moved)
        asked = 1
        while not file.exists():
            await site.ask("GET", "/live")
            await asyncio.sleep(0.1)
            asked += 1
        await site.until(lambda: len((moved.read_text() + file.read_text()).splitlines()) == asked)


def test_a_file_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"frontend\.access_log: .*No such file or directory; give a file"):
        AccessLog(str(tmp_path / "none" / "access.log"), as_json=True)


def tenants(**configs: dict) -> dict[str, TenantConfig]:
    """Make tenants whose key is their name."""
    return {name: TenantConfig(keys=(hash_of(name),), **config) for name, config in configs.items()}


async def ask(site: Site, tenant: str, *headers: str, body: bytes = b""):
    return await site.ask("POST", CHAT, body or chat(), f"Authorization: Bearer {tenant}", *headers)


async def figures(site: Site, name: str) -> dict[str, float]:
    lines = (await site.ask("GET", "/metrics", b"", ADMIN)).body.decode().splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line.startswith(name)]
    return {labels.removeprefix(name): float(value) for labels, value in found}


async def test_requests_past_a_rate_are_429_and_another_tenant_is_not_touched() -> None:
    async with serving(tenants=tenants(a={"requests_per_s": 0.01}, b={})) as site:
        assert (await ask(site, "a")).status == 200
        refused = await ask(site, "a")
        assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
        assert refused.error["code"] == "rate_limit_exceeded"
        assert 90 <= int(refused.headers["retry-after"]) <= 100
        client = site.client.with_options(api_key="a")
        with pytest.raises(openai.RateLimitError, match=r"requests_per_s is 0\.01"):
            await client.chat.completions.create(model="tiny", messages=HI)
        for _ in range(3):
            assert (await ask(site, "b")).status == 200
        answer = await site.ask("GET", "/v1/models", b"", "Authorization: Bearer a")
        assert answer.status == 200, "only generation counts"
        assert await figures(site, "penstock_frontend_tenant_refusals_total") == {
            '{limit="requests_per_s",tenant="a"}': 2
        }


async def test_no_more_than_so_many_requests_are_in_flight_and_a_client_that_leaves_makes_room() -> None:
    async def waiting(request: Request) -> AsyncIterator[Delta]:
        if request.tenant == "a":
            await asyncio.sleep(3600)
        async for delta in SPEAK(request):
            yield delta

    async with serving(waiting, tenants=tenants(a={"concurrency": 2}, b={"concurrency": 1})) as site:
        usage = site.frontend.access.tenants.of_key(b"a").usage
        clients = [await site.connect() for _ in range(2)]
        for _, writer in clients:
            writer.write(http("POST", CHAT, chat(), "Authorization: Bearer a"))
        await site.until(lambda: usage.inflight == 2)
        refused = await ask(site, "a")
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert "2 of its requests are in flight" in refused.error["message"]
        assert (await ask(site, "b")).status == 200
        gauge = "penstock_frontend_tenant_inflight_requests"
        assert await figures(site, gauge) == {'{tenant="a"}': 2, '{tenant="b"}': 0}
        for _, writer in clients:
            writer.transport.abort()
        await site.until(lambda: usage.inflight == 0)
        site.dispatcher.script = SPEAK
        assert (await ask(site, "a")).status == 200


async def test_prompts_of_tenants_have_salts_of_their_own() -> None:
    configs = tenants(a={}, b={}, c={"cache_salt": "ours"}, d={"cache_salt": "ours"}, e={"cache_salt": ""})
    large = chat(metadata={"filler": "x" * 100_000})
    async with serving(tenants=configs) as site:
        for body in (b"", chat(cache_salt="mine")):
            for name in configs:
                assert (await ask(site, name, body=body)).status == 200
        salts = [request.salt for request in site.dispatcher.opened]
        a, b, c, d, e, a_mine, b_mine, c_mine, d_mine, e_mine = salts
        assert len({a, b, c, e, a_mine, b_mine, c_mine, e_mine}) == 8
        assert (c, c_mine) == (d, d_mine)
        assert e == b"tiny", "an empty one is that of requests without keys"
        assert len({request.block_hashes for request in site.dispatcher.opened if request.block_hashes}) in {
            0,
            8,
        }
        stolen = chat(cache_salt=a.partition(b"|cache_salt=")[2].decode())
        await ask(site, "e", body=stolen)
        assert site.dispatcher.opened[-1].salt == a, "who knows a salt may use it: nobody is told one"
        assert (await ask(site, "a", body=large)).status == 200
        assert site.dispatcher.opened[-1].salt == a, "an encoder process has the salt too"


async def test_a_tenants_priority_is_its_highest() -> None:
    configs = tenants(high={"priority": "high"}, normal={}, low={"priority": "low"}, edge={"trusted": True})
    async with serving(tenants=configs) as site:
        for name in configs:
            for header in ((), ("X-Priority: high",), ("X-Priority: low",)):
                assert (await ask(site, name, *header, "X-Tenant-Id: other")).status == 200
            await ask(site, name, body=chat(agent_hints={"priority": 7}))
        got = [(request.tenant, request.priority) for request in site.dispatcher.opened]
        assert got == [
            ("high", 1), ("high", 1), ("high", -1), ("high", 7),
            ("normal", 0), ("normal", 0), ("normal", -1), ("normal", 0),
            ("low", -1), ("low", -1), ("low", -1), ("low", -1),
            ("other", 0), ("other", 1), ("other", -1), ("edge", 7),
        ]  # fmt: skip


async def test_names_that_a_gateway_makes_up_are_no_labels() -> None:
    async with serving(tenants=tenants(edge={"trusted": True, "requests_per_s": 3}, known={})) as site:
        for name in ("u1", "u2", "known", "u3", "u4"):
            await ask(site, "edge", f"X-Tenant-Id: {name}")
        assert [request.tenant for request in site.dispatcher.opened] == ["u1", "u2", "known", "u3"]
        inflight = await figures(site, "penstock_frontend_tenant_inflight_requests")
        assert inflight == {'{tenant="edge"}': 0, '{tenant="known"}': 0}
        for header in ((), ("Authorization: Bearer edge",)):
            hashed = (await site.ask("GET", "/metrics", b"", *header)).body.decode()
            assert "penstock_frontend_tenant_inflight_requests{" in hashed
            assert 'tenant="edge"' not in hashed, "names are for the admin token"
        assert await figures(site, "penstock_frontend_tenant_refusals_total") == {
            '{limit="requests_per_s",tenant="edge"}': 1
        }


@pytest.mark.slow
def test_a_key_file_is_changed_under_real_processes(deploy, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    file, old, new = tmp_path / "keys.yaml", new_key(), new_key()

    def write(*keys: str) -> None:
        listed = "".join(f"    - {hash_of(key)}\n" for key in keys)
        (tmp_path / "next").write_text(f"tenants:\n  team:\n    concurrency: 8\n    keys:\n{listed}")
        (tmp_path / "next").replace(file)

    async def scenario(site) -> None:
        async def status(key: str) -> int:
            headers = {
                "Authorization": f"Bearer {key}",
                "Connection": "close",
            }  # so that each frontend is asked
            body = {"model": "penstock-demo", "messages": HI, "max_tokens": 2}
            async with site.http.post(f"{site.url}{CHAT}", json=body, headers=headers) as response:
                await response.read()
                return response.status

        async def all_are(key: str, expected: int) -> bool:
            return {await status(key) for _ in range(8)} == {expected}

        assert await all_are(old, 200)
        assert await all_are(new, 401)
        write(old, new)
        await site.until(lambda: all_are(new, 200))
        assert await all_are(old, 200), "both count while clients change"
        write(new)
        await site.until(lambda: all_are(old, 401))
        file.write_text("tenants: {team: {keys: [plain]}}")
        await asyncio.sleep(2.5)
        assert await all_are(new, 200), "a wrong file changes nothing"

    write(old)
    frontend = {"port": 0, "processes": 2, "drain_timeout_s": 10, "api_key_file": str(file)}
    deploy(scenario, frontend=frontend)
