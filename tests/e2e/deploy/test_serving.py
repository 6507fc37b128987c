"""Serving over real processes and sockets, with the real openai client."""

import asyncio

import psutil
import pytest

from tests.support.given_by import given_by

pytestmark = pytest.mark.slow

MODEL = "penstock-demo"
LONG = "Tell me about rivers. " * 40  # some hundred tokens, many blocks


@given_by("deploy")
async def test_a_stream_and_a_whole_answer_are_the_same(site):
    text, usage = await site.tell("hello", max_tokens=32)
    whole = await site.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=32, seed=7
    )
    assert whole.choices[0].message.content == text != ""
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == usage.completion_tokens == 32
    assert whole.usage.prompt_tokens == usage.prompt_tokens > 0
    models = await site.client.models.list()
    assert [model.id for model in models.data] == [MODEL]
    completion = await site.client.completions.create(model=MODEL, prompt="one two", max_tokens=4, n=2)
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert completion.usage.completion_tokens == 8


@given_by("deploy", request_plane={"connection_bytes_max": 1 << 15, "write_buffer_bytes": 1 << 14})
async def test_many_choices_of_a_long_prompt_wait_for_their_worker_to_read_them(site):
    prompt = [200 + number % 1500 for number in range(4000)]  # 20 KB on its way
    answer = await site.client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, n=64)
    assert len(answer.choices) == 64


@given_by("deploy", workers=2)
async def test_two_workers_share_many_requests_and_none_is_lost(site):
    answers = await asyncio.gather(*(site.tell(f"{n} {LONG}", max_tokens=16) for n in range(32)))
    assert all(usage.completion_tokens == 16 for _, usage in answers)
    generated = {name: worker["load"]["generated_tokens"] for name, worker in (await site.workers()).items()}
    assert sum(generated.values()) == 32 * 16
    assert min(generated.values()) >= 4 * 16, generated


@given_by("deploy", frontends=2)
async def test_two_frontend_processes_share_the_port_and_the_workers(site):
    pids = {pid for name, pid in site.deployment.pids().items() if name.startswith("frontend")}
    assert len(pids) == 2
    reached = set()
    for _ in range(10):  # the kernel spreads connections by their source ports
        connections = [await asyncio.open_connection(*address_of(site)) for _ in range(8)]
        reached = {pid for pid in pids if connected(pid, site)}
        for _, writer in connections:
            writer.close()
        if reached == pids:
            break
    assert reached == pids
    answers = await asyncio.gather(*(fresh_chat(site) for _ in range(16)))
    assert answers == [3] * 16
    async with site.http.get(f"{site.url}/metrics") as response:  # one answers for both
        metrics = await response.text()
    assert f'penstock_frontend_output_tokens_total{{model="{MODEL}"}} 48.0' in metrics
    assert 'penstock_router_workers{condition="ready"} 1.0' in metrics
    site.kill("frontend-1")

    async def back():
        return sum(line.startswith("frontend-1 ready") for line in site.said) == 2

    await site.until(back)
    async with site.http.get(f"{site.url}/metrics") as response:  # counts stay, states of the dead do not
        metrics = await response.text()
    assert f'penstock_frontend_output_tokens_total{{model="{MODEL}"}} 48.0' in metrics
    assert 'penstock_router_workers{condition="ready"} 1.0' in metrics


def address_of(site):
    host, port = site.url.removeprefix("http://").split(":")
    return host, int(port)


def connected(pid, site):
    """Whether this process has accepted a connection at the deployment's port."""
    connections = psutil.Process(pid).net_connections("tcp")
    return any(
        c.status == psutil.CONN_ESTABLISHED and c.laddr.port == address_of(site)[1] for c in connections
    )


async def fresh_chat(site):
    """Ask on a connection of its own; give the number of tokens that came."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    async with site.http.post(
        f"{site.url}/v1/chat/completions", json=body, headers={"Connection": "close"}
    ) as response:
        return (await response.json())["usage"]["completion_tokens"]


@given_by("deploy", workers=3)
async def test_a_prefix_goes_to_the_worker_that_holds_it(site):
    _, first = await site.tell(LONG, max_tokens=4)
    assert first.prompt_tokens_details.cached_tokens == 0
    (holder,) = [name for name, w in (await site.workers()).items() if w["indexed_blocks"]]
    for n in range(8):
        _, usage = await site.tell(f"{LONG} {n}", max_tokens=4)
        assert usage.prompt_tokens_details.cached_tokens > first.prompt_tokens / 2
    generated = {name: w["load"]["generated_tokens"] for name, w in (await site.workers()).items()}
    assert generated[holder] == sum(generated.values()) == 9 * 4
