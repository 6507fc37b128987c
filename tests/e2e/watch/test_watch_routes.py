"""The page's routes on real sockets: who may watch and kill, and what watchers cost."""

import asyncio
import json

import msgspec
import pytest
from frontend_site import ADMIN, chat, http, of_keys, serving

from penstock.core.errors import Unavailable
from penstock.frontend.config import PageConfig
from penstock.frontend.watch import snapshot
from penstock.frontend.watch.overview import Overview

OWN = ("Host: 127.0.0.1:8000", "X-Penstock-Page: kill")


class FakeSupervisor:
    def __init__(self):
        self.killed = []
        self.asked = 0

    async def overview(self):
        self.asked += 1
        if self.asked == 2:
            raise Unavailable("it restarts")
        return Overview(name="fake", seconds=10.0, arrivals_per_s=2.5)

    async def kill(self, worker):
        self.killed.append(worker)


async def watched(site, *headers):
    return await site.ask("GET", "/watch/snapshot", b"", *headers)


async def test_the_page_and_its_files_need_no_key_and_come_from_here_alone():
    async with serving(tenants=of_keys("secret")) as site:
        page = await site.ask("GET", "/")
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for name in ("app.js", "style.css", "icon.svg"):
            file = await site.ask("GET", f"/page/{name}")
            assert file.status == 200
            assert b"://" not in file.body.replace(b"http://www.w3.org/2000/svg", b"")
        same = await site.ask("GET", "/", b"", f"If-None-Match: {page.headers['etag']}")
        assert (same.status, same.body) == (304, b"")
        for path in ("/page/../config.py", "/page/%2e%2e%2fconfig.py", "/page/none.js"):
            assert (await site.ask("GET", path)).status == 404


@pytest.mark.parametrize(
    ("tenants", "config", "asks"),
    [
        (None, {}, False),
        (of_keys("secret"), {}, True),
        (None, {"host": "0.0.0.0"}, True),
        (None, {"page": PageConfig(asks_token=True)}, True),
        (of_keys("secret"), {"page": PageConfig(asks_token=False)}, False),
    ],
    ids=["alone", "keys", "other machines", "asks", "open"],
)
async def test_who_may_watch(tenants, config, asks):
    async with serving(tenants=tenants, **config) as site:
        for path in ("/watch/snapshot", "/watch/requests/x"):
            answer = await site.ask("GET", path)
            assert (answer.status == 401) is asks, answer.body
            own_key = await site.ask("GET", path, b"", "Authorization: Bearer secret")
            assert (own_key.status == 401) is asks
        assert (await watched(site, ADMIN)).status == 200


async def test_a_page_that_is_off_is_not_there():
    async with serving(page=PageConfig(enabled=False)) as site:
        for path in ("/", "/page/app.js", "/watch/snapshot"):
            assert (await site.ask("GET", path)).status == 404


async def test_other_sites_may_not_watch_whatever_the_api_allows():
    async with serving(cors_origins=("*",)) as site:
        answer = await watched(site, "Origin: https://evil.example")
        assert "access-control-allow-origin" not in answer.headers
        asked = await site.ask("OPTIONS", "/watch/workers/w/kill", b"", "Origin: https://evil.example")
        assert "access-control-allow-headers" not in asked.headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (OWN, 204),
        ((*OWN, "Origin: http://127.0.0.1:8000"), 204),
        (("Host: localhost:8000", OWN[1]), 204),
        (("Host: [::1]:8000", OWN[1]), 204),
        (OWN[:1], 403),
        ((*OWN, "Origin: https://evil.example"), 403),
        ((*OWN, "Origin: null"), 403),
        (("Host: rebound.example:8000", OWN[1], "Origin: http://rebound.example:8000"), 403),
    ],
)
async def test_only_the_own_page_kills(headers, status):
    supervisor = FakeSupervisor()
    async with serving(supervisor=supervisor, page=PageConfig(kills_workers=True)) as site:
        answer = await site.ask("POST", "/watch/workers/worker-1/kill", b"", *headers)
        assert answer.status == status, answer.body
        assert supervisor.killed == (["worker-1"] if status == 204 else [])


async def test_nobody_kills_where_that_is_not_configured():
    supervisor = FakeSupervisor()
    async with serving(supervisor=supervisor) as site:
        answer = await site.ask("POST", "/watch/workers/worker-1/kill", b"", *OWN)
        assert answer.status == 403
        assert "frontend.page.kills_workers" in answer.error["message"]
        assert supervisor.killed == []


async def watch(site):
    """Watch until the first snapshot came; gives None where the server refuses."""
    reader, writer = await site.connect()
    writer.write(http("GET", "/watch/events"))
    if b" 200 " not in await reader.readline():
        writer.close()
        return None
    await reader.readuntil(b"data: ")
    assert json.loads(await reader.readline())["models"] == ["tiny"]
    return reader, writer


async def test_watchers_are_few_and_end_with_the_server(monkeypatch):
    monkeypatch.setattr(snapshot, "WATCHERS_MAX", 2)
    supervisor = FakeSupervisor()
    async with serving(supervisor=supervisor) as site:
        await site.ask("POST", "/v1/chat/completions", chat())
        assert supervisor.asked == 0, "nobody watches"
        first, second = [await watch(site) for _ in range(2)]
        refused = await site.ask("GET", "/watch/events")
        assert refused.status == 503
        assert "2 watch this server already" in refused.error["message"]
        first[1].close()
        while (third := await watch(site)) is None:  # noqa: ASYNC110 - the server notices a little later
            await asyncio.sleep(0.01)
        closing = asyncio.ensure_future(site.server.close())
        for reader, writer in (second, third):
            await reader.read()  # it ends
            writer.close()
        await closing


async def test_a_supervisor_that_does_not_answer_is_an_alert_and_no_failure(monkeypatch):
    monkeypatch.setattr(snapshot, "INTERVAL_S", 0.0)
    async with serving(supervisor=FakeSupervisor()) as site:
        first = (await site.ask("GET", "/watch/snapshot")).json
        assert first["overview"]["arrivals_per_s"] == 2.5
        second = (await site.ask("GET", "/watch/snapshot")).json
        assert second["overview"] is None
        assert any("it restarts" in alert["text"] for alert in second["alerts"])


async def test_the_way_of_one_answer_is_told():
    async with serving() as site:
        answered = json.loads((await site.ask("POST", "/v1/chat/completions", chat())).body)
        told = await site.ask("GET", f"/watch/requests/{answered['id']}")
        assert msgspec.json.decode(told.body)["journeys"][0]["request_id"].startswith(answered["id"])
        assert (await site.ask("GET", "/watch/requests/none")).status == 404
