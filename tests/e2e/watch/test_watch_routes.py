"""The page's routes on real sockets: who may watch and kill, and what watchers cost."""

import asyncio
import json

import msgspec
import pytest
from frontend_site import ADMIN, Answer, chat, of_keys, serving

from penstock.core.errors import Unavailable
from penstock.frontend.config import PageConfig
from penstock.frontend.http.server import FrontendServer
from penstock.frontend.watch import feed
from penstock.frontend.watch.overview import Overview
from tests.support.dispatcher import ScriptedDispatcher

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
    async with serving_with(supervisor, page=PageConfig(kills_workers=True)) as ask:
        answer = await ask("POST", "/watch/workers/worker-1/kill", *headers)
        assert answer.status == status, answer.body
        assert supervisor.killed == (["worker-1"] if status == 204 else [])


async def test_nobody_kills_where_that_is_not_configured():
    supervisor = FakeSupervisor()
    async with serving_with(supervisor) as ask:
        answer = await ask("POST", "/watch/workers/worker-1/kill", *OWN)
        assert answer.status == 403
        assert "frontend.page.kills_workers" in answer.error["message"]
        assert supervisor.killed == []


async def test_watchers_share_snapshots_are_few_and_end_with_the_server(monkeypatch):
    monkeypatch.setattr(feed, "WATCHERS_MAX", 2)
    taken = 0

    async def counted(frontend, supervisor):
        nonlocal taken
        taken += 1
        return await take(frontend, supervisor)

    take = feed.take_snapshot
    monkeypatch.setattr(feed, "take_snapshot", counted)
    async with serving() as site:
        await site.ask("POST", "/v1/chat/completions", chat())
        assert taken == 0, "nobody watches"
        readers = []
        for _ in range(2):
            reader, writer = await site.connect()
            writer.write(b"GET /watch/events HTTP/1.1\r\nHost: test\r\n\r\n")
            assert b" 200 " in await reader.readline()
            await reader.readuntil(b"data: ")
            snapshot = json.loads(await reader.readline())
            assert snapshot["models"] == ["tiny"]
            readers.append((reader, writer))
        assert taken <= 2, "the second one has the first one's snapshot, unless a second has passed"
        refused = await site.ask("GET", "/watch/events")
        assert refused.status == 503
        assert "2 watch this server already" in refused.error["message"]
        readers[0][1].close()
        await site.until(lambda: site.server._surface._watch._feed.watchers == 1)
        closing = asyncio.ensure_future(site.server.close())
        await readers[1][0].read()  # it ends
        await closing
        readers[1][1].close()


async def test_a_supervisor_that_does_not_answer_is_an_alert_and_no_failure(monkeypatch):
    monkeypatch.setattr(feed, "INTERVAL_S", 0.0)
    async with serving_with(FakeSupervisor()) as ask:
        first = json.loads((await ask("GET", "/watch/snapshot")).body)
        assert first["overview"]["arrivals_per_s"] == 2.5
        second = json.loads((await ask("GET", "/watch/snapshot")).body)
        assert second["overview"] is None
        assert any("it restarts" in alert["text"] for alert in second["alerts"])


async def test_the_way_of_one_answer_is_told():
    async with serving() as site:
        answered = json.loads((await site.ask("POST", "/v1/chat/completions", chat())).body)
        told = await site.ask("GET", f"/watch/requests/{answered['id']}")
        assert msgspec.json.decode(told.body)["journeys"][0]["request_id"].startswith(answered["id"])
        assert (await site.ask("GET", "/watch/requests/none")).status == 404


class serving_with:  # noqa: N801 - used as a function
    """Serve with a supervisor; gives a function that asks."""

    def __init__(self, supervisor, **config):
        self._supervisor = supervisor
        self._site = serving(dispatcher=ScriptedDispatcher(None), **config)

    async def __aenter__(self):
        site = await self._site.__aenter__()
        self._server = FrontendServer(site.frontend, supervisor=self._supervisor)
        _, site.port = await self._server.start()

        async def ask(method, path, *headers):
            named = any(header.startswith("Host:") for header in headers)
            reader, writer = await site.connect()
            lines = [
                f"{method} {path} HTTP/1.1",
                *([] if named else ["Host: test"]),
                "Connection: close",
                *headers,
            ]
            writer.write("\r\n".join([*lines, "", ""]).encode())
            raw = await reader.read()
            writer.close()
            return Answer(raw)

        return ask

    async def __aexit__(self, *error):
        await self._server.close()
        await self._site.__aexit__(*error)
