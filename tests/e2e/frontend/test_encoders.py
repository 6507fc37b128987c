"""Large bodies, which a process of their own understands: answers and refusals as of small ones, and streams that do not wait."""

import asyncio
import json
import os
import signal
from pathlib import Path

from frontend_site import HI, Answer, Site, chat, http, loop_not_blocked, run, serving

from penstock.core.wire import token_list
from penstock.frontend.requests.encoders import LARGE_BYTES
from tests.support.dispatcher import ScriptedDispatcher, speak
from tests.support.tokenizer import tiny_card

PATH = "/v1/chat/completions"
PADDING = "p" * (LARGE_BYTES + 1)


def children() -> list[int]:
    """Give the encoders of this process."""
    pids = []
    for task in Path("/proc/self/task").iterdir():
        pids += [int(pid) for pid in (task / "children").read_text().split()]
    return [
        pid
        for pid in pids
        if b"penstock.frontend.requests.encoder" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_large_bodies_are_understood_as_small_ones_are() -> None:
    async def test() -> None:
        adapter = tiny_card().adapted("tuned")
        dispatcher = ScriptedDispatcher(speak([5, 6]), cards=[tiny_card(), adapter])
        async with serving(dispatcher=dispatcher) as site:
            fields = {
                "max_tokens": 9, "n": 2, "temperature": 0.5, "seed": 7, "stop": ["never"], "cache_salt": "mine",
                "logprobs": True, "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            for model in ("tiny", "tuned"):
                small = await site.ask("POST", PATH, chat(model=model, **fields))
                large = await site.ask("POST", PATH, chat(model=model, metadata=PADDING, **fields))
                assert (small.status, large.status) == (200, 200)
                assert small.body.count(b"data: ") == large.body.count(b"data: ")
                assert b'"usage":{' in large.body
            plain = [token_list(dispatcher.opened[0].token_ids), [1, 2, 3]]
            await site.ask("POST", "/v1/completions", json.dumps({"model": "tiny", "prompt": plain}).encode())
            body = {"model": "tiny", "prompt": plain, "metadata": PADDING}
            await site.ask("POST", "/v1/completions", json.dumps(body).encode())
            opened = dispatcher.opened
            assert len(opened) == 2 * 2 * 2 + 2 * 2
            for one, other in ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11)):
                for field in ("token_ids", "block_hashes", "salt", "model", "adapter", "choice"):
                    assert getattr(opened[one], field) == getattr(opened[other], field), field
                one_sampling, other_sampling = opened[one].sampling, opened[other].sampling
                if one < 8:
                    assert one_sampling == other_sampling
            (pid,) = children()  # one was enough, and stays
        assert pid not in children()

    run(test)


def test_refusals_of_large_bodies_have_the_apis_shape() -> None:
    async def test() -> None:
        async with serving() as site:
            cases = [
                (chat(metadata=PADDING, max_tokns=1), 400, "max_tokns", None),
                (chat(metadata=PADDING, max_tokens=-1), 400, "max_tokens", None),
                (chat(metadata=PADDING, model="none"), 404, "model", "model_not_found"),
                (chat(metadata=PADDING)[:-1], 400, None, None),
                (chat(messages=[{"role": "user", "content": PADDING}]), 400, "messages", "context_length_exceeded"),
            ]  # fmt: skip
            for body, status, param, code in cases:
                answer = await site.ask("POST", PATH, body)
                error = answer.error
                assert (answer.status, error["param"], error["code"]) == (status, param, code), error
            assert (await site.ask("POST", PATH, chat(metadata=PADDING))).status == 200
            assert len(children()) == 1
            assert site.frontend.budget.size_bytes == 0

    run(test)


def slow_body() -> bytes:
    """Write one that takes an encoder a while: it has two million lists."""
    return b'{"model":"tiny","prompt":[' + b"[1]," * 2_000_000 + b"[1]]}"


async def begin(site: Site, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await site.connect()
    writer.write(http("POST", "/v1/completions", body))
    return reader, writer


def test_streams_go_on_while_a_hostile_body_is_read_and_its_end_frees_the_encoder() -> None:
    async def test() -> None:
        async with serving(receive={"encoders_max": 1}) as site:
            body = slow_body()
            async with loop_not_blocked(), asyncio.timeout(10):
                _, writer = await begin(site, body)
                await site.until(lambda: site.frontend.admission.inflight == 1 and bool(children()))
                (pid,) = children()
                assert (await site.ask("POST", PATH, chat())).status == 200
            writer.close()  # whoever asked is gone: so is the work
            await site.until(lambda: not Path(f"/proc/{pid}").exists())
            assert (await site.ask("POST", PATH, chat(metadata=PADDING))).status == 200
            assert children() != [pid]

    run(test)


def test_an_encoder_that_dies_fails_its_request_alone() -> None:
    async def test() -> None:
        async with serving() as site:
            reader, writer = await begin(site, slow_body())
            await site.until(lambda: bool(children()))
            (pid,) = children()
            os.kill(pid, signal.SIGKILL)
            answer = Answer(await reader.readuntil(b"}}"))
            assert (answer.status, answer.error["code"]) == (500, "internal_error")
            assert "status -9" in answer.error["message"]
            writer.close()
            assert (await site.ask("POST", PATH, chat(metadata=PADDING, messages=HI))).status == 200

    run(test)
