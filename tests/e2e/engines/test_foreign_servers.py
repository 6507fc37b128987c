"""Running servers as workers: whole deployments whose workers are fake servers of this test, sound and hostile."""

import asyncio
from typing import Any

import openai
import pytest
from aiohttp import web
from tokenizers import Tokenizer

from penstock.demo import MODEL_DIR
from tests.support.fake_server import FakeServer, after, cut, says

TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
CHECKS = {"health": {"interval_s": 0.1, "timeout_s": 1.0, "retry_s_max": 0.3}, "limits": {"silence_s": 3.0}}


def nightly(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.nightly)


def fakes(*apis: str, **fields: Any) -> list[FakeServer]:
    return [FakeServer(TOKENIZER, api, **fields) for api in apis]


def serve(deploy, scenario, servers: list[FakeServer], *, before=None, roles=None, **fields) -> None:
    """Run a scenario against a deployment with these servers as workers.

    The servers live in the test's own loop, which starts them first: their ports have to be known to the graph.
    """
    import threading

    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def host() -> None:
        for server in servers:
            await server.start()
        started.set()
        await stop.wait()
        for server in servers:
            await server.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(host(),))
    thread.start()
    try:
        assert started.wait(10)

        async def call(function) -> None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(function, loop))

        if before is not None:
            loop.call_soon_threadsafe(before, loop)
        args = {"url": [server.url for server in servers], **CHECKS}
        described = {"aggregated": {"engine": {"name": "openai", "args": args}}} if roles is None else roles()
        deploy(lambda site: scenario(site, call), roles=described, timeout_s=180, **fields)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def expected(server: FakeServer, prompt: list[int], count: int) -> str:
    return TOKENIZER.decode(server.continuation(prompt, count))


async def complete(site, prompt: list[int], count: int, **options) -> Any:
    return await site.client.completions.create(
        model="penstock-demo",
        prompt=prompt,
        max_tokens=count,
        temperature=0.0,
        extra_body={"ignore_eos": True},
        **options,
    )


PROMPT = TOKENIZER.encode("Tell me about penstocks, please.").ids


@pytest.mark.parametrize("api", ["vllm", *(nightly(api) for api in ("trtllm", "sglang", "llamacpp"))])
def test_a_completion_is_what_the_server_answers(deploy, api):
    (server,) = servers = fakes(api)

    async def scenario(site, call):
        answer = await complete(site, PROMPT, 24)
        assert answer.choices[0].text == expected(server, PROMPT, 24)
        assert answer.choices[0].finish_reason == "length"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 24)
        assert answer.usage.prompt_tokens_details.cached_tokens > 0
        text, usage = await site.tell("hello", max_tokens=16)
        assert text
        assert usage.completion_tokens == 16

    serve(deploy, scenario, servers)


@pytest.mark.parametrize("api", ["text", nightly("ollama")])
def test_the_text_of_a_text_server_is_unchanged(deploy, api):
    (server,) = servers = fakes(api)

    async def scenario(site, call):
        asked = {"model": "penstock-demo", "prompt": "Tell me", "max_tokens": 40, "temperature": 0.0}
        async with site.http.post(f"{site.url}/v1/completions", json=asked) as response:
            answer = await response.json()
        assert response.status == 200, answer
        known = TOKENIZER.encode("Tell me").ids
        assert answer["choices"][0]["text"] == expected(server, known, 40)

    serve(deploy, scenario, servers)


def test_a_server_that_dies_within_an_answer_is_left_and_the_text_goes_on(deploy):
    servers = fakes("vllm", "sglang", token_s=0.01)

    async def scenario(site, call):
        stream = await complete(site, PROMPT, 120, stream=True)
        text, count = "", 0
        async for chunk in stream:
            text += chunk.choices[0].text if chunk.choices else ""
            count += 1
            if count == 20:
                busy = next(server for server in servers if server.open)
                await call(busy.stop())
        assert text == expected(servers[0], PROMPT, 120)
        assert sum(bool(server.open) for server in servers) == 0

        async def out() -> bool:
            return sum(w["condition"] == "unhealthy" for w in (await site.workers()).values()) == 1

        await site.until(out)
        (problem,) = [w["problem"] for w in (await site.workers()).values() if w["condition"] == "unhealthy"]
        assert problem == f"{busy.url}: no connection: connection refused"
        assert any("unhealthy" in line and problem in line for line in site.said)
        for _ in range(4):
            await complete(site, PROMPT, 4)
        await call(busy.start())

        async def back() -> bool:
            return await site.ready_workers() == 2

        await site.until(back)
        assert any(line.endswith("ready serves again") for line in site.said)

    serve(deploy, scenario, servers)


@pytest.mark.parametrize("status", [500, *(nightly(status) for status in (401, 403, 404))])
def test_a_status_that_is_not_about_the_prompt_is_passed_on_and_blames_it_not(deploy, status):
    (server,) = servers = fakes("vllm")

    def refusing(times):
        def refuse():
            nonlocal times
            times -= 1
            server.refuse = refuse if times else None
            return web.json_response({"error": {"message": "the server says why"}}, status=status)

        return refuse

    async def scenario(site, call):
        server.refuse = refusing(2)
        assert (await complete(site, PROMPT, 8)).choices[0].text == expected(server, PROMPT, 8)
        server.refuse = refusing(1000)
        with pytest.raises(openai.InternalServerError, match=f"{status}: the server says why"):
            await complete(site, PROMPT, 8)
        server.refuse = None
        await site.until(lambda: is_ready(site))
        assert (await complete(site, PROMPT, 8)).choices[0].text == expected(server, PROMPT, 8)

    async def is_ready(site):
        return await site.ready_workers() == 1

    serve(deploy, scenario, servers, router={"no_worker_wait_s": 0.5})


HOSTILE = {
    "garbage": says(b"data: {{{\n\n"),
    "half a line": says(b'data: {"choices": [{"te', then_cut=True),
    "a huge line": says(b"data: " + b"x" * (3 << 20)),
    "a cut": cut,
}


@pytest.mark.parametrize(
    "name", ["half a line", *(nightly(name) for name in HOSTILE if name != "half a line")]
)
def test_answers_go_on_elsewhere_when_a_server_turns_hostile(deploy, name):
    hostile, sound = servers = fakes("vllm", "vllm")

    async def scenario(site, call):
        hostile.fault = after(5, HOSTILE[name])
        answers = await asyncio.gather(*(complete(site, [*PROMPT, 300 + number], 40) for number in range(12)))
        for number, answer in enumerate(answers):
            assert answer.choices[0].text == expected(sound, [*PROMPT, 300 + number], 40)
        assert any(len(body["prompt"]) == len(PROMPT) + 1 + 5 for body in sound.bodies), (
            "one went on from 5 tokens"
        )
        hostile.fault = None

        async def back() -> bool:
            return await site.ready_workers() == 2

        await site.until(back)

    serve(deploy, scenario, servers)


@pytest.mark.parametrize("api", ["vllm", nightly("sglang")])
def test_prompts_go_to_a_prefill_server_and_answers_come_from_a_decode_server(deploy, api):
    prefill, decode = servers = fakes(api, api)
    prefill.rooms = decode.rooms
    prefill.is_paired = decode.is_paired = True
    prompt = [5 + number % 300 for number in range(200)]

    async def scenario(site, call):
        answer = await complete(site, prompt, 16)
        assert answer.choices[0].text == expected(decode, prompt, 16)
        assert answer.usage.completion_tokens == 16
        (pulled,) = decode.pulled
        assert pulled.get("remote_engine_id", pulled.get("host")) in {prefill.url, "127.0.0.1"}

        async def is_computed(prompts):
            return prefill.prefills == prompts

        # The fake decode server answers without waiting for the prefill server.
        await site.until(lambda: is_computed(1))
        before = len(decode.bodies)
        await asyncio.gather(*(complete(site, [number, *prompt], 8) for number in range(5, 11)))
        assert len(decode.bodies) == before + 6
        assert len(decode.pulled) == 7
        await site.until(lambda: is_computed(7))

        async def at_rest() -> bool:
            return not prefill.open and not decode.open

        await site.until(at_rest)

    serve(
        deploy, scenario, servers,
        roles=lambda: {
            "prefill": {"engine": "openai", "engine_args": CHECKS | {"url": [prefill.url]}},
            "decode": {"engine": "openai", "engine_args": CHECKS | {"url": [decode.url]}},
        },
        router={"disagg": {"local_tokens_max": 0}},
    )  # fmt: skip


@pytest.mark.parametrize("is_there", [nightly(True), False], ids=["another model", "not there"])
def test_a_deployment_starts_with_the_servers_that_serve(deploy, is_there):
    late, good = servers = fakes("vllm", "vllm")
    late.model = "llama"

    async def scenario(site, call):
        assert await site.ready_workers() == 1
        why = "serves 'llama', expected" if is_there else "no connection: connection refused"
        assert any(line.startswith("worker-1 failed") and why in line for line in site.said)
        assert (await complete(site, PROMPT, 4)).choices[0].text == expected(good, PROMPT, 4)
        late.model = "penstock-demo"
        if not is_there:
            await call(late.start())

        async def both() -> bool:
            return await site.ready_workers() == 2

        await site.until(both)

    def stop(loop) -> None:
        if not is_there:
            loop.create_task(late.stop())

    supervision = {"spare_processes": 0, "restart_delay_s": 0.05, "restart_delay_max_s": 0.2}
    serve(deploy, scenario, servers, before=stop, supervision=supervision)


def test_a_server_that_loads_for_long_is_waited_for(deploy):
    (server,) = servers = fakes("vllm")
    server.loading_checks = 4

    async def scenario(site, call):
        failures = [line for line in site.said if "worker-1 failed" in line]
        assert len(failures) == 4, "more often than supervision.failed_starts_max"
        assert f"{server.url}/health: 503: Loading model; starts again in" in failures[0]
        assert (await complete(site, PROMPT, 4)).choices[0].text == expected(server, PROMPT, 4)

    supervision = {"spare_processes": 0, "restart_delay_s": 0.05, "failed_starts_max": 2}
    serve(deploy, scenario, servers, supervision=supervision)
