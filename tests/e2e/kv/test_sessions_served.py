"""Sessions of agents in real processes, by the openai client: KV stays through tool calls, and goes when it should."""

import asyncio

import openai
import pytest

WORDS = " ".join(f"river {word}" for word in range(80))
MOCK = {"engine": "mock", "kv_blocks": 256, "sessions": {"ttl_s": 30, "ttl_s_max": 60}}
PAGED = {"engine": "paged", "kv_blocks": 256, "weight_dtype": "float32"}


async def ask(site, text, *, max_tokens=4, **fields):
    """Ask a chat; returns (answer, cached tokens, prompt tokens)."""
    answer = await site.client.chat.completions.create(
        model="penstock-demo",
        messages=[{"role": "user", "content": text}],
        max_tokens=max_tokens,
        seed=7,
        extra_body={"ignore_eos": True, **fields},
    )
    usage = answer.usage
    return answer.choices[0].message.content, usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens


async def pass_by(site, count=24):
    """Have other requests fill the cache."""
    await asyncio.gather(*(ask(site, f"{n} {n * 7} " + WORDS) for n in range(count)))


async def sessions(site, **expected):
    """Wait until the only worker's counts are as expected."""
    (name,) = await site.workers()

    async def are_so():
        counts = (await site.load(name))["sessions"] or {}
        return all(counts.get(field, 0) == value for field, value in expected.items())

    await site.until(are_so)


@pytest.mark.parametrize(
    "role", [pytest.param(MOCK, id="mock"), pytest.param(PAGED, id="paged", marks=pytest.mark.nightly)]
)
def test_a_prefix_stays_through_a_tool_call_and_goes_when_the_session_is_closed(deploy, role):
    async def scenario(site):
        history = "the agent's plan " + WORDS
        text, _, _ = await ask(site, history, session={"id": "agent-1", "action": "open"})
        await ask(site, "plain " + WORDS)
        await sessions(site, open=1)
        await pass_by(site)  # the tool runs
        again, cached, prompt = await ask(site, history, session={"id": "agent-1"})
        assert (again, cached) == (text, (prompt - 1) // 16 * 16)
        _, cached, _ = await ask(site, "plain " + WORDS)
        assert cached < 64  # no more than the template's beginning
        closing = {"session_id": "agent-1", "action": "close"}
        await ask(site, history, nvext={"session_control": closing})
        await sessions(site, open=0, closed=1, pinned_blocks=0)
        await pass_by(site)
        _, cached, _ = await ask(site, history)
        assert cached < 64

    deploy(scenario, role=role)


def test_a_sub_agents_kv_is_freed_when_it_closes_or_is_silent(deploy):
    async def scenario(site):
        (name,) = await site.workers()
        _, _, prompt = await ask(site, "main " + WORDS)
        before = (prompt + 3) // 16

        async def cached(blocks):
            async def is_so():
                return (await site.load(name))["cached_blocks"] == blocks

            await site.until(is_so)

        await cached(before)
        sub = {"id": "sub", "action": "open", "ephemeral": True}
        _, shared, prompt = await ask(site, "sub " + WORDS, session=sub)
        await cached(before + (prompt + 3 - shared) // 16)
        await ask(site, "sub " + WORDS, session={"id": "sub", "action": "close"})
        await cached(before)
        await sessions(site, open=0, closed=1)
        await ask(site, "sub " + WORDS, session=sub | {"ttl_s": 1})
        await sessions(site, open=0, closed=1, expired=1)
        await cached(before)

        async def is_shown():
            async with site.http.get(f"{site.url}/metrics") as response:
                metrics = await response.text()
            return f'penstock_router_session_ends{{reason="expired",worker="{name}"}} 1.0' in metrics

        await site.until(is_shown)

    deploy(scenario, role=MOCK)


def test_a_session_stays_with_its_worker_and_goes_on_elsewhere_when_that_is_lost(deploy):
    async def scenario(site):
        history = "the agent's plan " + WORDS
        text, _, _ = await ask(site, history, session={"id": "agent", "action": "open"})

        async def keepers():
            return [
                name
                for name, worker in (await site.workers()).items()
                if ((worker["load"] or {}).get("sessions") or {}).get("open")
            ]

        async def is_kept():
            return bool(await keepers())

        await site.until(is_kept)
        (keeper,) = await keepers()
        busy = [asyncio.create_task(ask(site, f"{n} " + WORDS, max_tokens=200)) for n in range(8)]
        for _ in range(4):
            again, cached, prompt = await ask(site, history, session={"id": "agent"})
            assert (again, cached) == (text, (prompt - 1) // 16 * 16)
        assert await keepers() == [keeper]
        await asyncio.gather(*busy)
        site.kill(keeper)
        again, _, _ = await ask(site, history, session={"id": "agent"})
        assert again == text
        await site.until(is_kept)  # its new worker keeps it: the router knows that the session is open
        assert await keepers() != [keeper]

    deploy(scenario, role=MOCK, workers=2)


REFUSALS = [
    ({"session": {"id": ""}}, "session.id", "must have 1 to 256 characters, got 0"),
    ({"session": {"id": "a", "action": "stop"}}, "session.action", "'open', 'close', got 'stop'"),
    ({"session": {"id": "a", "action": "open", "ttl_s": 61}}, "session.ttl_s", "sessions.ttl_s_max, got 61"),
    ({"session": {"id": "a", "ttl": 3}}, "session.ttl", "unknown field"),
    ({"session": {"id": 3}}, "session.id", "expected string, got integer"),
    ({"nvext": {"agent_hints": {"osl": 0}}}, "nvext.agent_hints.osl", "must be >= 1"),
]


def test_wrong_fields_are_refused_by_name(deploy):
    async def scenario(site):
        for fields, param, text in REFUSALS:
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(site, "hi", **fields)
            assert caught.value.param == param
            assert text in caught.value.message

    deploy(scenario, role=MOCK)
