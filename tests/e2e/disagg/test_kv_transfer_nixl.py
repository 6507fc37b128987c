"""KV that NIXL moves between a prefill and a decode worker, each a process: answers are those of one worker. `make test` installs NIXL."""

import pytest

pytestmark = pytest.mark.slow

PROMPT = "Which parts does a request pass on its way, and what does each of them do with it? " * 6
TOKENS = 24
ROLE = {"replicas": 1, "engine": "paged", "max_batch_tokens": 64, "weight_dtype": "float32"}


@pytest.mark.parametrize("stream_kv", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_answers_are_those_of_one_worker_and_nixl_moved_all_blocks(deploy, one_worker, stream_kv):
    prompts = [f"{number} {PROMPT}" for number in range(3)]
    whole = []

    async def ask(site):
        return [(await site.tell(prompt, max_tokens=TOKENS))[0] for prompt in prompts]

    async def alone(site):
        whole.extend(await ask(site))

    async def disaggregated(site):
        assert await ask(site) == whole
        workers = await site.workers()
        (read,) = workers["decode-1"]["load"]["kv_reads"]
        assert read["transport"] == "nixl"
        assert read["prefill_worker"] == workers["prefill-1"]["worker_id"]
        computed = workers["decode-1"]["load"]["prefilled_tokens"]
        assert read["num_bytes"] > 0
        assert computed <= 16 * len(prompts), "nothing but what no full block holds is computed again"

    one_worker(alone)
    deploy(
        disaggregated,
        roles={"prefill": ROLE, "decode": ROLE},
        router={"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}},
        worker={
            "kv_transfer": {"stream_kv": stream_kv, "pin_ttl_s": 120, "transfer": {"transports": ["nixl"]}}
        },
        timeout_s=180,
    )
