"""Large bodies, which a process of their own understands: answers and refusals as of small ones, and streams that do not wait."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from frontend_site import HI, Site, chat, http, serving

from penstock.core.wire import token_list
from penstock.frontend.encoders import LARGE_BYTES
from tests.support.dispatcher import ScriptedDispatcher, speak
from tests.support.tokenizer import tiny_card

PATH = "/v1/chat/completions"
PADDING = "p" * (LARGE_BYTES + 1)


def children() -> list[int]:
    """Give the encoders of this process."""
    pids = []
    for task in Path("/proc/self/task").iterdir():
        pids += [int(pid) for pid in (task / "children").read_text().split()]
    return [pid for pid in pids if b"penstock.frontend.encoders" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_large_bodies_are_understood_as_small_ones_are() -> None:
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


async def test_refusals_of_large_bodies_have_the_apis_shape() -> None:
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


LARGE: dict[str, dict[str, object]] = {
    PATH: {"messages": HI, "metadata": PADDING},
    "/v1/completions": {"prompt": "hi", "metadata": PADDING},
    "/v1/responses": {"input": "hi", "prompt_cache_key": PADDING},
    "/v1/messages": {"messages": HI, "max_tokens": 9, "metadata": {"user_id": PADDING}},
    "/v1/embeddings": {"input": "hi", "user": PADDING},
}


async def stopped_encoder(site: Site) -> int:
    """Have an encoder started, and stop it; give its pid."""
    assert (await site.ask("POST", PATH, chat(metadata=PADDING))).status == 200
    (pid,) = children()
    os.kill(pid, signal.SIGSTOP)
    return pid


@pytest.mark.parametrize("path", LARGE)
async def test_others_are_answered_while_the_encoder_of_a_large_body_stands_still(path: str) -> None:
    async with serving(receive={"encoders_max": 1}) as site:
        pid = await stopped_encoder(site)
        asking = asyncio.ensure_future(site.post(path, **LARGE[path]))
        await site.until(lambda: site.frontend.admission.inflight == 1)
        for _ in range(3):
            assert (await site.ask("POST", PATH, chat())).status == 200
        assert not asking.done(), "nobody but the encoder reads it"
        os.kill(pid, signal.SIGCONT)
        assert (await asking).status in {200, 500}  # this dispatcher makes no embeddings


async def test_an_encoder_ends_with_the_request_that_is_given_up() -> None:
    async with serving(receive={"encoders_max": 1}) as site:
        pid = await stopped_encoder(site)
        _, writer = await site.connect()
        writer.write(http("POST", PATH, chat(metadata=PADDING)))
        await site.until(lambda: site.frontend.admission.inflight == 1)
        writer.close()  # whoever asked is gone: so is the work
        await site.until(lambda: not Path(f"/proc/{pid}").exists())
        assert (await site.ask("POST", PATH, chat(metadata=PADDING))).status == 200
        assert children() != [pid]


async def test_an_encoder_that_dies_fails_its_request_alone() -> None:
    async with serving() as site:
        pid = await stopped_encoder(site)
        asking = asyncio.ensure_future(site.ask("POST", PATH, chat(metadata=PADDING)))
        await site.until(lambda: site.frontend.admission.inflight == 1)
        os.kill(pid, signal.SIGKILL)
        answer = await asking
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        assert "status -9" in answer.error["message"]
        assert (await site.ask("POST", PATH, chat(metadata=PADDING))).status == 200
