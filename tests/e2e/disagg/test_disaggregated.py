"""Prefill and decode on different workers: real processes, the paged engine's real KV, whoever is killed."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROMPT = "Which parts does a request pass on its way, and what does each of them do with it? " * 4
TOKENS = 40
ALWAYS = {"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}}


def roles(prefill=1, decode=1, **role):
    role = {"kv_blocks": 1000} | role  # all of it is taken at the start
    return {"prefill": {"replicas": prefill} | role, "decode": {"replicas": decode} | role}


async def metric(site, name):
    async with site.http.get(f"{site.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def explained(site):
    async with site.http.get(f"{site.url}/admin/explain?last=10") as response:
        return (await response.json())["decisions"]


def own_kv(site, worker):
    """Name the arenas that a worker has open, by inode: only its own."""
    files = Path(f"/proc/{site.deployment.pids()[worker]}/fd").iterdir()
    return {file.stat().st_ino for file in files if "penstock-arena" in str(file.readlink())}


def mapped(site, worker):
    """Name the arenas that a worker has mapped, its own and others', by inode."""
    lines = Path(f"/proc/{site.deployment.pids()[worker]}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "penstock-arena" in line}


def test_greedy_seeded_and_several_choices_are_those_of_one_worker(deploy):
    asked = [
        {"temperature": 0},
        {"temperature": 1.0, "n": 2},
        {"temperature": 0, "extra_body": {"prompt_logprobs": 1}},
        {"temperature": 0.8, "logprobs": True, "top_logprobs": 2},
    ]

    async def choices(site, options):
        answer = await site.client.chat.completions.create(
            model="penstock-demo",
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=TOKENS,
            seed=7,
            **options,
        )
        return [
            (
                choice.message.content,
                choice.finish_reason,
                [
                    (token.token, round(token.logprob, 3))
                    for token in (choice.logprobs.content if choice.logprobs else [])
                ],
                [
                    at and {token_id: round(entry["logprob"], 3) for token_id, entry in at.items()}
                    for at in (answer.model_extra or {}).get("prompt_logprobs", [])
                ],
            )
            for choice in answer.choices
        ]

    async def answers(site):
        found = [await choices(site, options) for options in asked]
        assert len(found[2][0][3]) > len(PROMPT.split())
        text = found[-1][0][0]
        found.append(await choices(site, asked[-1] | {"stop": [text[len(text) // 2 :][:8]]}))
        (whole,), (stopped,) = found[-2:]
        assert stopped[1] == "stop"
        assert whole[0].startswith(stopped[0])
        assert 0 < len(stopped[2]) < len(whole[2])
        return found

    whole = []

    async def alone(site):
        whole.extend(await answers(site))

    async def disaggregated(site):
        assert await answers(site) == whole
        remote = await metric(site, 'penstock_router_prefills_total{place="remote"}')
        assert remote == 5, "of two choices the second goes on where the first one's prompt is"
        decode = await site.load("decode-1")
        size = 16
        assert decode["prefilled_tokens"] <= 6 * size, "next to nothing is computed again"
        assert (await site.load("prefill-1"))["generated_tokens"] == 5
        assert own_kv(site, "prefill-1") & mapped(site, "decode-1"), (
            "KV is read where it lies, not copied twice"
        )

        async def nothing_is_held():
            loads = [await site.load(name) for name in ("prefill-1", "decode-1")]
            return all(load["active_blocks"] == 0 for load in loads)

        await site.until(nothing_is_held)

    deploy(alone, role={"engine": "paged"}, timeout_s=120)
    deploy(disaggregated, roles=roles(engine="paged"), router=ALWAYS, timeout_s=120)


KILLS = (("decode", 1), ("prefill", 1), ("decode", 6))
"""Whom, after how many chunks; with the first one blocks may still be fetched, and after some the prefill worker has nothing to do with it."""


@pytest.mark.parametrize("engine", ["mock", pytest.param("paged", marks=pytest.mark.nightly)])
def test_a_worker_killed_at_any_moment_is_not_noticed(deploy, engine):
    async def scenario(site):
        for number, (victim, at_chunk) in enumerate(KILLS):
            prompt = f"{number} {PROMPT}"
            expected = (await site.tell(prompt, max_tokens=TOKENS))[0]
            text, chunks = "", 0
            async for chunk in site.stream(prompt, max_tokens=TOKENS):
                text += site.text_of(chunk)
                chunks += 1
                if chunks == at_chunk:
                    last = (await explained(site))[-1]
                    site.kill(last["worker"] if victim == "decode" else last["prefill"]["worker"])
            assert text == expected
            if victim == "prefill":  # there are two of each, of which one may be away
                await site.until(lambda: all_back(site))

    async def all_back(site):
        return await site.ready_workers() == 4

    deploy(scenario, roles=roles(2, 2, engine=engine), router=ALWAYS, timeout_s=480)


def test_decode_workers_serve_alone_while_there_is_no_prefill_worker(deploy):
    async def scenario(site):
        expected, _ = await site.tell(PROMPT, max_tokens=TOKENS)
        site.kill("prefill-1")
        text, _ = await site.tell(PROMPT, max_tokens=TOKENS)
        assert text == expected

        async def back():
            return await site.ready_workers() == 2

        await site.until(back)
        before = await metric(site, 'penstock_router_prefills_total{place="remote"}')
        assert (await site.tell(PROMPT, max_tokens=TOKENS))[0] == expected
        assert await metric(site, 'penstock_router_prefills_total{place="remote"}') == before + 1

    deploy(scenario, roles=roles(engine="mock"), router=ALWAYS)
