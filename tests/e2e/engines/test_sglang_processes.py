"""Deployments of SGLang workers, over a fake of the package in each worker's process: SGLang itself needs a GPU."""

import os
import signal

import openai
import pytest

from tests.support.sglang_package import sglang_path

ROLE = {"engine": {"name": "sglang", "args": {"device": "cpu"}}, "max_running_requests": 8}
PROMPT = "What is a penstock, and who opens its gate when the reservoir is full? " * 3


@pytest.fixture
def sglang(monkeypatch, tmp_path):
    """Let workers import the fake package; gives the directory of its bootstrap rooms."""
    rooms = tmp_path / "rooms"
    rooms.mkdir()
    monkeypatch.setenv("FAKE_SGLANG_ROOMS", str(rooms))
    monkeypatch.setenv("PYTHONPATH", sglang_path(tmp_path))
    return rooms


def test_prefill_and_decode_workers_give_the_same_text_as_an_aggregated_one(deploy, sglang) -> None:
    told = []

    async def tell(site) -> None:
        told.append(await site.tell(PROMPT, max_tokens=24))

    async def tell_again(site) -> None:
        await tell(site)
        for words in range(
            20
        ):  # some fill their last block, and the router expects all of them in the decode worker's cache
            for _ in range(2):
                await site.tell("and " * words, max_tokens=2)

    deploy(tell, role=ROLE)
    assert not list(sglang.iterdir())
    deploy(tell_again, roles={"prefill": ROLE, "decode": ROLE})
    (alone, usage), (apart, usage_apart) = told
    assert apart == alone != ""
    assert usage.completion_tokens == usage_apart.completion_tokens == 24
    assert usage.prompt_tokens == usage_apart.prompt_tokens
    assert len(list(sglang.iterdir())) == 41, "each prompt went through a bootstrap room of its own"


def test_without_a_prefill_worker_requests_are_refused_soon(deploy, sglang) -> None:
    async def main(site) -> None:
        with pytest.raises(openai.APIStatusError, match="a decode worker computes no prompts") as refused:
            await site.tell("hello", max_tokens=2)
        assert refused.value.status_code == 503

    deploy(main, roles={"prefill": ROLE | {"replicas": 0}, "decode": ROLE})


def test_a_stream_goes_on_elsewhere_when_sglang_fails(deploy, sglang) -> None:
    async def main(site) -> None:
        busy: list[str] = []

        async def is_known() -> bool:
            loads = {name: (each["load"] or {}) for name, each in (await site.workers()).items()}
            busy[:] = [name for name, load in loads.items() if load.get("running_requests")]
            return bool(busy)

        usage, chunks = None, 0
        async for chunk in site.stream(PROMPT, max_tokens=600, temperature=0):
            chunks += 1
            usage = chunk.usage or usage
            if chunks == 5:
                await site.until(is_known, timeout_s=3)
                os.kill(site.deployment.pids()[busy[0]], signal.SIGQUIT)  # as SGLang's processes do
        assert len(busy) == 1
        assert usage is not None
        assert usage.completion_tokens == 600
        failed = [line for line in site.said if "one of its processes failed" in line]
        assert len(failed) == 1, site.said

    deploy(main, workers=2, role=ROLE)
