"""Roles that change while requests run: real processes, the paged engine's real KV, and the command that asks for it."""

import asyncio

import pytest

from penstock.cli import main
from penstock.cli.scale import change_role
from penstock.core.types.instances import Role
from penstock.deploy.control.local_connector import FrontendAddress

PROMPT = "Which parts does a request pass on its way, and what does each of them do with it? " * 4
TOKENS = 24
ALWAYS = {"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}}


async def become(site, worker, role):
    changed = await asyncio.to_thread(change_role, FrontendAddress(site.url), worker, role)
    print(f"{worker}: {changed.before} to {role} in {changed.took_s:.3f} s")
    assert (await site.workers())[worker]["role"] == role
    return changed


async def keep_asking(site, expected, stopping):
    """Ask one after the other, and compare; returns how many were answered."""
    answered = 0
    while not stopping.is_set():
        for prompt, text in expected.items():
            assert (await site.tell(prompt, max_tokens=TOKENS))[0] == text
            answered += 1
    return answered


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["mock", pytest.param("paged", marks=pytest.mark.nightly)])
def test_requests_are_answered_exactly_while_a_prefill_worker_becomes_a_decode_worker_and_back(
    deploy, engine
):
    async def scenario(site):
        prompts = [f"{number} {PROMPT}" for number in range(3)]
        expected = {prompt: (await site.tell(prompt, max_tokens=TOKENS))[0] for prompt in prompts}
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(keep_asking(site, expected, stopping)) for _ in range(3)]
            for role in (Role.DECODE, Role.PREFILL, Role.AGGREGATED, Role.PREFILL):
                await become(site, "prefill-1", role)
                await asyncio.sleep(0.5)
            await become(site, "decode-1", Role.PREFILL)
            await asyncio.sleep(0.5)
            await become(site, "decode-1", Role.DECODE)
            stopping.set()
        assert all(task.result() >= len(prompts) for task in asking)

        async def nothing_is_held():
            loads = [await site.load(name) for name in ("prefill-1", "decode-1", "decode-2")]
            return all(load["active_blocks"] == 0 for load in loads)

        await site.until(nothing_is_held)

    roles = {"prefill": {"engine": engine}, "decode": {"replicas": 2, "engine": engine}}
    deploy(scenario, roles=roles, router=ALWAYS, timeout_s=120)


def test_a_deployment_without_roles_gets_a_prefill_worker(deploy, capfd):
    async def command(site, *words):
        capfd.readouterr()
        code = await asyncio.to_thread(main, ["role", *words, "--url", site.url])
        return code, "".join(capfd.readouterr())

    async def scenario(site):
        code, said = await command(site, "worker-1", "prefill")
        assert code == 0
        assert said.startswith("worker-1: prefill now, was aggregated; took ")
        expected, _ = await site.tell(PROMPT, max_tokens=TOKENS)
        assert (await site.load("worker-2"))["prefilled_tokens"] <= 16, "the rest was fetched"
        code, said = await command(site, "worker-2", "prefill")
        assert code == 1
        assert said == (
            "penstock: worker-2 is the last worker that answers for model penstock-demo: as a prefill worker it would"
            " only compute prompts; make another one a decode worker first\n"
        )
        assert (await command(site, "worker-1", "aggregated"))[0] == 0
        assert (await site.tell(PROMPT, max_tokens=TOKENS))[0] == expected

    deploy(scenario, workers=2, router=ALWAYS)
