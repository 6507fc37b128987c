"""Tenants over real sockets: keys, limits with Retry-After, caches of their own, and a key file that changes under real processes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from frontend_site import HI, SPEAK, Site, chat, http, serving

from penstock.core.types.requests import Delta, Request
from penstock.frontend.tenants.api_key import hash_of, new_key
from penstock.frontend.tenants.key_file import TenantConfig

CHAT = "/v1/chat/completions"


def tenants(**configs: dict) -> dict[str, TenantConfig]:
    """Make tenants whose key is their name."""
    return {name: TenantConfig(keys=(hash_of(name),), **config) for name, config in configs.items()}


async def ask(site: Site, tenant: str, *headers: str, body: bytes = b""):
    return await site.ask("POST", CHAT, body or chat(), f"Authorization: Bearer {tenant}", *headers)


async def figures(site: Site, name: str) -> dict[str, float]:
    lines = (await site.ask("GET", "/metrics")).body.decode().splitlines()
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
