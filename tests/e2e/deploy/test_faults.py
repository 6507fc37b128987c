"""What users see while processes die, clients go away and readers stall."""

import asyncio
import json
import socket

import psutil
import pytest

from penstock.runtime.discovery.local import LocalHub
from tests.support.given_by import given_by

pytestmark = pytest.mark.slow

PROMPT = "Tell me about rivers, slowly. " * 8
TOKENS = 200
RSS_GROWTH_MAX = 8 << 20


@given_by("deploy")
async def test_the_only_worker_goes_on_with_its_streams_once_it_is_back(site):
    undisturbed, _ = await site.tell(PROMPT, max_tokens=TOKENS)
    text = ""
    async for chunk in site.stream(PROMPT, max_tokens=TOKENS):
        if not text:
            site.kill("worker-1")
        text += site.text_of(chunk)
    assert text == undisturbed


@given_by("deploy", workers=2)
async def test_all_streams_survive_one_worker(site):
    prompts = [f"{n} {PROMPT}" for n in range(16)]
    undisturbed = await asyncio.gather(*(site.tell(prompt, max_tokens=TOKENS) for prompt in prompts))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(site.tell(prompt, max_tokens=TOKENS)) for prompt in prompts]
        await site.until(all_busy(site))
        site.kill("worker-1")
    for task, (text, usage) in zip(tasks, undisturbed, strict=True):
        assert task.result()[0] == text
        assert task.result()[1].prompt_tokens == usage.prompt_tokens
        assert task.result()[1].completion_tokens == TOKENS
    assert any(line.startswith("worker-1 failed killed by SIGKILL") for line in site.said)
    await site.until(all_ready(site))
    assert (await site.tell(prompts[0], max_tokens=TOKENS))[0] == undisturbed[0][0]


@given_by("deploy", workers=2)
async def test_streams_and_new_requests_go_on_without_the_hub(site):
    undisturbed, _ = await site.tell(PROMPT, max_tokens=TOKENS)
    async with asyncio.TaskGroup() as group:
        stream = group.create_task(site.tell(PROMPT, max_tokens=TOKENS))
        await site.until(all_busy(site, 1))
        hub = site.deployment.hub
        for client in tuple(hub.server.sessions):
            client.channel.abort("killed by a test")
        await hub.close()
        meanwhile = group.create_task(site.tell(PROMPT, max_tokens=TOKENS))
    assert stream.result()[0] == meanwhile.result()[0] == undisturbed
    site.kill("worker-1")  # nobody can say that it is gone, but its connection does
    assert (await site.tell(PROMPT, max_tokens=TOKENS))[0] == undisturbed
    again = LocalHub(hub.identity, listen=hub.address)
    await again.start()
    try:
        await site.until(all_ready(site))
        assert (await site.tell(PROMPT, max_tokens=TOKENS))[0] == undisturbed
    finally:
        await again.close()


@given_by("deploy")
async def test_a_client_that_goes_away_frees_its_blocks(site):
    async def idle():
        load = await site.load("worker-1")
        return load["running_requests"] == load["waiting_requests"] == load["active_blocks"] == 0

    async def busy():
        return (await site.load("worker-1"))["active_blocks"] > 0

    for number in range(3):
        stream = site.stream(PROMPT, max_tokens=3000)
        await anext(stream)
        await site.until(busy)
        await stream.aclose()
        await site.until(idle)
        assert (await site.load("worker-1"))["generated_tokens"] < 3000 * (number + 1), "before their end"


@given_by("deploy")
async def test_a_stalled_reader_holds_up_nobody(site):
    worker = psutil.Process(site.deployment.pids()["worker-1"])
    await site.tell(PROMPT, max_tokens=TOKENS)
    before = worker.memory_info().rss
    stalled = [stalled_stream(site.url, max_tokens=3000) for _ in range(8)]
    try:
        await site.until(all_busy(site, 8))
        text, usage = await site.tell(PROMPT, max_tokens=TOKENS)
        assert usage.completion_tokens == TOKENS
        assert await site.tell(PROMPT, max_tokens=TOKENS) == (text, usage)
        assert worker.memory_info().rss - before < RSS_GROWTH_MAX
    finally:
        for connection in stalled:
            connection.close()

    async def idle():
        return (await site.load("worker-1"))["active_blocks"] == 0

    await site.until(idle)


def all_ready(site):
    async def holds():
        return await site.ready_workers() == 2

    return holds


def all_busy(site, requests=None):
    """Whether every worker has something to do, or `requests` run on all workers together."""

    async def holds():
        running = [
            (worker["load"] or {}).get("running_requests", 0) for worker in (await site.workers()).values()
        ]
        return sum(running) >= requests if requests else min(running) > 0

    return holds


def stalled_stream(url, max_tokens):
    """Ask for a stream by hand, and never read."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(
        {
            "model": "penstock-demo",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": max_tokens,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    connection.sendall(body)
    return connection
