"""`penstock top` and `penstock chat` against real processes, by pipe and by a terminal."""

import asyncio
import json
import subprocess
import sys

import pytest

from tests.support.terminal import terminal

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "penstock"]
ROLES = {
    "prefill": {"replicas": 1, "engine": "mock", "kv_blocks": 400},
    "decode": {"replicas": 1, "engine": "mock", "kv_blocks": 400},
}
ALWAYS = {"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}}


def say(*arguments, text=None):
    done = subprocess.run(
        [*COMMAND, *arguments], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_top_shows_workers_and_requests_once_and_until_q(deploy):
    async def scenario(site):
        await site.tell("warm " * 40, max_tokens=4)
        await asyncio.to_thread(watch, site.url)

    def watch(url):
        code, said, problem = say("top", "--url", url, "--once")
        assert (code, problem) == (0, "")
        for text in (
            "prefill-1",
            "decode-1",
            "prefill-1 > decode-1",
            "nothing needs attention",
            "requests/s",
            "device",
        ):
            assert text in said, said
        _, said, _ = say("top", "--url", url, "--json")
        assert json.loads(said)["num_workers"] == 2
        with terminal(*COMMAND, "top", "--url", url) as top:
            top.until("requests/s")
            top.until("decode-1")
            top.type("\r")
            top.until("decode-1: decode worker of penstock-demo")
            top.until("400 blocks")  # of its log
            top.type("\x1b")
            top.until("prefill-1")
            top.type("4")
            top.until("prefill-1 > decode-1")
            top.type("q")
            assert top.code() == 0

    deploy(scenario, timeout_s=180, roles=ROLES, router=ALWAYS)


def test_chat_streams_tells_where_answers_came_from_and_obeys(deploy):
    async def scenario(site):
        await asyncio.to_thread(chat, site.url)

    def chat(url):
        code, said, problem = say("chat", "--url", url, "--max-tokens", "5", text="hello there")
        assert (code, problem) == (0, "")
        assert said.strip()
        code, _, problem = say("chat", "--url", url, "--model", "none", "hi")
        assert (code, "the server has penstock-demo" in problem) == (1, True)
        with terminal(*COMMAND, "chat", "--url", url, "--max-tokens", "8") as talk:
            talk.until("penstock-demo> ")
            talk.type("what is a router\n")
            talk.until("by prefill-1 (prompt), decode-1")
            talk.until("prompt tokens cached")
            talk.until("penstock-demo> ")
            talk.type("/nonsense\n")
            talk.until("there is no /nonsense; /help lists commands")
            talk.type("/max 0\n")
            talk.until("must be a number >= 1")
            talk.type("/model\n")
            talk.until("penstock-demo\r\n")
            talk.type("/max 100000\n")
            talk.until("penstock-demo> ")
            talk.type("too long\n")
            talk.until("4096")
            talk.type("/max 8\n/undo\n/new\nagain\n")
            talk.until("8 tokens")
            talk.until("penstock-demo> ")
            talk.type("/quit\n")
            assert talk.code() == 0

    deploy(scenario, timeout_s=180, roles=ROLES, router=ALWAYS)


def test_a_server_that_is_not_there_or_asks_for_a_token_is_said(deploy, monkeypatch):
    assert say("top", "--url", "http://127.0.0.1:9")[0] == 1
    assert say("chat", "--url", "ftp://x")[0] == 2

    async def scenario(site):
        monkeypatch.setenv("PENSTOCK_ADMIN_TOKEN", "wrong")
        code, _, problem = await asyncio.to_thread(say, "top", "--url", site.url)
        assert (code, "refuses the admin token in PENSTOCK_ADMIN_TOKEN" in problem) == (1, True), problem
        code, said, _ = await asyncio.to_thread(say, "chat", "--url", site.url, "hello")
        assert code == 0, "a chat needs no admin token"
        assert said.strip()

    deploy(scenario, timeout_s=180, frontend={"port": 0, "page": {"asks_token": True}})
