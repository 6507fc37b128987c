"""Deployments of SGLang workers, over a fake of the package in each worker's process: SGLang itself needs a GPU."""

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
        for words in range(5):
            await site.tell("and " * words, max_tokens=2)

    deploy(tell, role=ROLE)
    assert not list(sglang.iterdir())
    deploy(tell_again, roles={"prefill": ROLE, "decode": ROLE})
    (alone, usage), (apart, usage_apart) = told
    assert apart == alone != ""
    assert usage.completion_tokens == usage_apart.completion_tokens == 24
    assert usage.prompt_tokens == usage_apart.prompt_tokens
    assert len(list(sglang.iterdir())) == 6, "each prompt went through a bootstrap room of its own"
