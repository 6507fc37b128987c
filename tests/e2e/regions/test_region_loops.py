"""Forged marks of forwarded requests: a client that sets them, and a hostile region that removes them to have a request go round."""

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import aiohttp
import pytest
from aiohttp import web

from penstock.frontend.limits.keys import digest_of
from tests.support.host import until
from tests.support.up import Up

pytestmark = [pytest.mark.slow]
CLIENT, LINK = "sk-" + "c" * 40, "sk-" + "l" * 40


class HostileRegion:
    """Says that it is region eu, and hands every request back to the region that it came from, without its marks."""

    def __init__(self):
        self.victim = ""
        self.arrived = self.under_way = self.most_under_way = 0
        self.url = ""

    async def _hand_back(self, request):
        body = await request.read()
        is_answer = request.path == "/v1/completions"
        if is_answer:
            asked = json.loads(body)
            asked.pop("continuation", None)
            if asked["max_tokens"] == 1:  # the link's trial: it is answered, so that requests come
                chunk = {"choices": [{"index": 0, "text": "x", "token_ids": [5], "finish_reason": "length"}]}
                return web.Response(
                    body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode(),
                    content_type="text/event-stream",
                )
            body = json.dumps(asked).encode()
            self.arrived += 1
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        elif request.path == "/health":
            return web.Response(text="{}")
        elif request.path == "/load":
            load = {"workers": 1, "block_size": 16, "total_blocks": 512}
            said = {
                "models": {"penstock-demo": load},
                "region": "eu",
                "link_version": 1,
                "time_s": time.time(),
            }
            return web.json_response(said)
        headers = {"Authorization": f"Bearer {LINK}", "Content-Type": "application/json"}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.request(
                    request.method, self.victim + request.path_qs, data=body, headers=headers
                ) as answer,
            ):
                return web.Response(
                    status=answer.status, body=await answer.read(), content_type=answer.content_type
                )
        finally:
            self.under_way -= is_answer

    async def _serve(self, started, ending):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._hand_back)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await asyncio.to_thread(ending.wait)
        await runner.cleanup()

    @contextmanager
    def running(self):
        started, ending = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(started, ending)))
        thread.start()
        assert started.wait(30)
        try:
            yield self
        finally:
            ending.set()
            thread.join(30)


def ask(url, key, max_tokens, **headers):
    """Ask for an answer; give its status and body."""
    body = {
        "model": "penstock-demo",
        "prompt": "round and round",
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    said = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"} | headers
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), said)
    try:
        with urllib.request.urlopen(request, timeout=90) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def keys(folder, **links):
    tenants = {
        "client": {"keys": [f"sha256:{digest_of(CLIENT.encode()).hex()}"], "concurrency": 1},
        "eu": {"keys": [f"sha256:{digest_of(LINK.encode()).hex()}"], "cache_salt": "", **links},
    }
    file = folder / "keys.yaml"
    file.write_text(json.dumps({"tenants": tenants}))
    return str(file)


@contextmanager
def linked_to(hostile, folder, **links):
    """Run a region with a link to the hostile one; its worker can be killed."""
    run = folder / "run"
    run.mkdir(mode=0o700)
    us = Up(folder, run)
    us.environment["PENSTOCK_ADMIN_TOKEN"] = "a" * 40
    try:
        us.up(
            us.graph(
                router={"location": {"region": "us"}},
                regions=[{"name": "eu", "urls": [hostile.url], "health": {"interval_s": 0.5}}],
                frontend={"port": 0, "api_key_file": keys(folder, **links)},
                roles={"aggregated": {"engine": "mock", "max_running_requests": 4, "mock": {"speedup": 0.2}}},
            )
        )
        hostile.victim = us.url
        until(lambda: condition(us, "link-eu") == "ready")
        yield us
    finally:
        us.end()


def workers(us):
    request = urllib.request.Request(
        f"{us.url}/admin/workers", headers={"Authorization": f"Bearer {'a' * 40}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return {each["name"]: each for each in json.load(answer)["workers"]}


def condition(us, name):
    return workers(us).get(name, {}).get("condition")


def test_a_hostile_region_cannot_have_a_request_go_round_and_forged_marks_change_nothing(tmp_path):
    with HostileRegion().running() as hostile, linked_to(hostile, tmp_path, link=True) as us:
        assert ask(us.url, CLIENT, 4)[0] == 200
        marks = {"X-Penstock-Forwarded": "1", "X-Penstock-Region": "eu"}
        answers = []
        first = threading.Thread(target=lambda: answers.append(ask(us.url, CLIENT, 600, **marks)))
        first.start()
        until(lambda: workers(us)["worker-1"]["open_requests"] == 1)
        for forged in (
            marks,
            {"X-Penstock-Region": "us"},
            {"X-Penstock-Forwarded": "-1"},
            {"X-Penstock-Forwarded": "1, 1"},
        ):
            status, text = ask(us.url, CLIENT, 4, **forged)
            assert (status, "concurrency" in text or "at once" in text) == (429, True), text
        assert ask(us.url, "sk-" + "x" * 40, 4, **marks)[0] == 401
        first.join(90)
        assert answers[0][0] == 200
        assert hostile.arrived == 0, "own workers are nearer, and marks send nobody away"

        us.run("sleep", "worker-1", "--url", us.url)
        asking = threading.Thread(target=lambda: answers.append(ask(us.url, CLIENT, 8)))
        asking.start()
        until(lambda: hostile.arrived)
        us.run("wake", "worker-1", "--url", us.url)
        asking.join(90)
        assert answers[1][0] == 200, "it waited for a worker of its own region"
        assert hostile.most_under_way == 1, "no request was inside of another"


@pytest.mark.nightly
def test_with_a_key_of_an_ordinary_tenant_it_goes_round(tmp_path):
    """The test before can fail."""
    with HostileRegion().running() as hostile, linked_to(hostile, tmp_path, concurrency=8) as us:
        us.run("sleep", "worker-1", "--url", us.url)
        asking = threading.Thread(target=ask, args=(us.url, CLIENT, 8))
        asking.start()
        until(lambda: hostile.most_under_way > 3)
        assert hostile.most_under_way <= 9, "and its tenant's limit ends that"
        us.run("wake", "worker-1", "--url", us.url)
        asking.join(90)
