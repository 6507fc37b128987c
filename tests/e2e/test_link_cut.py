"""The connections between a prefill and a decode worker are cut, again and again: answers are those of one worker, nothing stays held."""

import asyncio
from contextlib import suppress

import pytest
from socket_cuts import cut_between

pytestmark = pytest.mark.slow

PROMPT = "Which parts does a request pass on its way, and what does each of them do with it? " * 16
TOKENS = 24
PAGED = {"replicas": 1, "engine": "paged", "max_batch_tokens": 64, "max_running_requests": 16}
PAUSES_S = (0.3, 0.1, 0.03, 0.01, 0.01, 0.005, 0.005, 0.005)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_answers_are_those_of_one_worker_and_uncut_links_are_used_again(deploy, transport):
    prompts = [f"{number} {PROMPT}" for number in range(1 + len(PAUSES_S) + 1)]
    whole = []

    async def alone(site):
        whole.extend([(await site.tell(prompt, max_tokens=TOKENS))[0] for prompt in prompts])

    async def apart(site):
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

        async def ask_and_read(number):
            before = await read_bytes()
            assert (await site.tell(prompts[number], max_tokens=TOKENS))[0] == whole[number]

            async def more():
                return await read_bytes() > before

            return more

        await site.until(await ask_and_read(0))
        for number, pause_s in enumerate(PAUSES_S, start=1):
            cutting = asyncio.ensure_future(cut(pause_s))
            assert (await site.tell(prompts[number], max_tokens=TOKENS))[0] == whole[number]
            cutting.cancel()
            with suppress(asyncio.CancelledError):
                await cutting
        assert cuts >= len(PAUSES_S)

        async def reads_have_failed():
            return (await site.load("decode-1"))["kv_failures"] > 0

        if (
            transport == "tcp"
        ):  # by shm the bytes move without the connection, and a cut may fall between two reads
            await site.until(reads_have_failed, timeout_s=10)
        assert site.deployment.pids() == pids, "nobody died of it"
        await site.until(await ask_and_read(-1))

        async def nothing_is_held():
            loads = [await site.load(name) for name in pids if name in ("prefill-1", "decode-1")]
            return all(load["active_blocks"] == 0 for load in loads)

        await site.until(nothing_is_held)

    deploy(alone, role=PAGED, timeout_s=150)
    deploy(
        apart,
        roles={"prefill": PAGED, "decode": PAGED},
        router={"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}},
        worker={"hand_over": {"stream_kv": True, "transfer": {"transports": [transport]}}},
        timeout_s=240,
    )
