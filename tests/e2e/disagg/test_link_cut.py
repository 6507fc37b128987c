"""The connections between a prefill and a decode worker are cut, again and again: answers are those of one worker, nothing stays held."""

import asyncio
from contextlib import suppress

import pytest
from socket_cuts import cut_between

pytestmark = pytest.mark.slow

PROMPT = "Which parts does a request pass on its way, and what does each of them do with it? " * 16
TOKENS = 24
PAGED = {
    "replicas": 1,
    "engine": "paged",
    "weight_dtype": "float32",
    "max_batch_tokens": 64,
    "max_running_requests": 16,
}
PAUSES_S = (0.3, 0.1, 0.03, 0.01, 0.01, 0.005, 0.005, 0.005)
"""Between cuts, one for each prompt; the last one also for as many further prompts as it takes to have a read fail."""
PROMPTS_MAX = 30


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.nightly)])
def test_answers_are_those_of_one_worker_and_uncut_links_are_used_again(deploy, one_worker, transport):
    prompts = [f"{number} {PROMPT}" for number in range(1 + PROMPTS_MAX + 1)]
    answers = {}

    async def disaggregated(site):
        pids = site.deployment.pids()
        cuts = 0

        async def cut(pause_s):
            nonlocal cuts
            while True:
                await asyncio.sleep(pause_s)
                cuts += cut_between(pids["prefill-1"], pids["decode-1"])

        async def read_bytes():
            reads = (await site.load("decode-1")).get("kv_reads", [])
            return sum(read["num_bytes"] for read in reads if read["transport"] == transport)

        async def reads_have_failed():
            return (await site.load("decode-1"))["kv_failures"] > 0

        async def ask(prompt):
            answers[prompt] = (await site.tell(prompt, max_tokens=TOKENS))[0]

        async def ask_and_read(prompt):
            before = await read_bytes()
            await ask(prompt)

            async def more():
                return await read_bytes() > before

            return more

        first, *between, last = prompts
        await site.until(await ask_and_read(first))
        for number, prompt in enumerate(between):
            if number >= len(PAUSES_S) and await reads_have_failed():
                break
            cutting = asyncio.ensure_future(cut(PAUSES_S[min(number, len(PAUSES_S) - 1)]))
            await ask(prompt)
            cutting.cancel()
            with suppress(asyncio.CancelledError):
                await cutting
        assert cuts >= len(PAUSES_S)
        await site.until(reads_have_failed)
        assert site.deployment.pids() == pids, "nobody died of it"
        await site.until(await ask_and_read(last))

        async def nothing_is_held():
            loads = [await site.load(name) for name in pids if name in ("prefill-1", "decode-1")]
            return all(load["active_blocks"] == 0 for load in loads)

        await site.until(nothing_is_held)

    async def alone(site):
        for prompt, answer in answers.items():
            assert (await site.tell(prompt, max_tokens=TOKENS))[0] == answer

    deploy(
        disaggregated,
        roles={"prefill": PAGED, "decode": PAGED},
        router={"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}},
        worker={"kv_transfer": {"stream_kv": True, "transfer": {"transports": [transport]}}},
        timeout_s=240,
    )
    one_worker(alone)
