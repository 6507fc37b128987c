"""Real processes that die again and again under streams, by chance and by a prompt."""

import asyncio
import random

import openai
import pytest

from tests.support.given_by import given_by

pytestmark = pytest.mark.slow

TOKENS, STREAMS = 100, 12
KILLS_ITS_WORKER, FAILS_ITS_STEPS = 666, 667
"""Seeds: of requests that do so wherever they go."""
POISON = f"""
import os, signal
from penstock.engine.mock.engine import MockRunner

run = MockRunner.run

async def poisoned(self, plan, table):
    for slot in plan.slots.tolist():
        request = table.requests[slot]
        if request is not None and request.sampling.seed == {KILLS_ITS_WORKER}:
            os.kill(os.getpid(), signal.SIGKILL)
        if request is not None and request.sampling.seed == {FAILS_ITS_STEPS}:
            raise RuntimeError("the device fell over")
    return await run(self, plan, table)

MockRunner.run = poisoned
"""


@pytest.fixture
def poisoned_engines(monkeypatch, tmp_path):
    """Have all processes begin with what makes some requests poisonous."""
    (tmp_path / "sitecustomize.py").write_text(POISON)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@given_by(
    "deploy",
    workers=3,
    timeout_s=150,
    role={"mock": {"timing": {"step_s": 0.03}}},
    router={"migrations": {"at_once": 2}},
)
async def test_streams_outlive_worker_after_worker_and_only_who_kills_them_is_refused(site, poisoned_engines):
    prompts = [f"{n} tell me about rivers" for n in range(STREAMS)]
    undisturbed = await asyncio.gather(*(site.tell(prompt, max_tokens=TOKENS) for prompt in prompts))
    rng = random.Random(5)

    async def restored():
        return await site.ready_workers() == 3

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(site.tell(prompt, max_tokens=3 * TOKENS)) for prompt in prompts]
        for _ in range(3):
            await asyncio.sleep(1.0)
            await site.until(restored)
            site.kill(rng.choice(list(await site.workers())))
        for seed in (FAILS_ITS_STEPS, KILLS_ITS_WORKER):
            with pytest.raises(openai.APIStatusError, match="refused for") as caught:
                await ask(site, f"poison {seed}", seed)
            assert caught.value.status_code == 503
            assert int(caught.value.response.headers["Retry-After"]) > 30
    for stream, (text, _) in zip(streams, undisturbed, strict=True):
        told, usage = stream.result()
        assert told.startswith(text)
        assert usage.completion_tokens == 3 * TOKENS
    again = await asyncio.gather(*(site.tell(prompt, max_tokens=TOKENS) for prompt in prompts))
    assert [text for text, _ in again] == [text for text, _ in undisturbed]


async def ask(site, prompt, seed):
    """Ask and wait for the whole answer: an error then has its status."""
    await site.client.chat.completions.create(
        model="penstock-demo",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=TOKENS,
        seed=seed,
        temperature=1.0,
    )
