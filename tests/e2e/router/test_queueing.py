"""Requests held by real frontends while a tiny worker is full: who is refused, who overtakes, and that none is lost."""

import asyncio
import os
import signal

import openai
import pytest

pytestmark = pytest.mark.slow

TOKENS = 40
TINY = {"kv_blocks": 48, "max_running_requests": 4, "mock": {"timing": {"step_s": 0.02}}}
"""Room for four requests, which take a second each."""
SLOW = TINY | {"mock": {"timing": {"step_s": 0.04}}}
FRONTEND = {"port": 0, "processes": 1, "drain_timeout_s": 60, "trust_headers": True}


def hold(requests_max: int, **settings) -> dict:
    return {"queue": {"threshold_s": 0.2, "requests_max": requests_max, "work_weight": 0} | settings}


class Crowd:
    """Requests sent one after the other; `ended` has the names of those answered, in order, `errors` those refused."""

    def __init__(self, site) -> None:
        self._site = site
        self.ended: list[str] = []
        self.errors: list[openai.APIStatusError] = []
        self.tasks: list[asyncio.Task] = []

    async def send(self, name: str, *, tenant: str = "", priority: str = "normal") -> None:
        self.tasks.append(asyncio.create_task(self._ask(name, tenant, priority)))
        await asyncio.sleep(0.02)  # so that the next one comes after it

    async def _ask(self, name: str, tenant: str, priority: str) -> None:
        headers = {"X-Tenant-Id": tenant, "X-Priority": priority}
        try:
            await self._site.tell(f"{name} {name} {name}", max_tokens=TOKENS, extra_headers=headers)
        except openai.APIStatusError as error:
            self.errors.append(error)
        else:
            self.ended.append(name)

    async def fill(self) -> None:
        """Send until some are held."""
        number = 0
        while not await self.metric("queued_requests"):
            await self.send(f"first-{number}", tenant="first")
            number += 1
            assert number < 20

    async def metric(self, name: str) -> float:
        async with self._site.http.get(f"{self._site.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        found = [line.split() for line in lines if line.startswith(f"penstock_router_{name}")]
        return sum(float(value) for _, value in found)


def test_past_the_bound_come_429_and_503_with_retry_after_and_who_was_held_is_answered(deploy):
    async def scenario(site):
        crowd = Crowd(site)
        await crowd.fill()
        for number in range(12):
            await crowd.send(f"a-{number}", tenant="a")
        for tenant in "bcdefghijklm":
            await crowd.send(f"{tenant}-0", tenant=tenant)
        held = await crowd.metric("queued_requests")
        await asyncio.gather(*crowd.tasks)
        codes = [error.status_code for error in crowd.errors]
        assert set(codes) == {429, 503}
        assert all(1 <= int(error.response.headers["Retry-After"]) <= 60 for error in crowd.errors)
        assert all("router.queue.requests_max" in error.message for error in crowd.errors)
        assert len(crowd.ended) + len(codes) == len(crowd.tasks)
        assert 1 <= held <= 16
        assert await crowd.metric("queued_requests") == 0
        assert await crowd.metric("queue_refusals_total") == len(codes)
        assert await crowd.metric("queued_seconds_count") >= held

    deploy(scenario, role=SLOW, router=hold(16), frontend=FRONTEND)


def test_who_waits_is_answered_by_turn_and_before_a_server_that_was_told_to_stop_does(deploy):
    """High priority overtakes, and a flood of one tenant starves nobody."""

    async def scenario(site):
        crowd = Crowd(site)
        await crowd.fill()
        for number in range(12):
            await crowd.send(f"flood-{number}", tenant="flood")
        await crowd.send("other", tenant="other")
        await crowd.send("urgent", tenant="flood", priority="high")
        load = await site.load("worker-1")
        assert load["running_requests"] == 4
        assert load["waiting_requests"] <= 2, "they wait at the frontend"
        assert await crowd.metric("queued_requests") >= 1
        os.kill(site.deployment.pids()["frontend-1"], signal.SIGTERM)
        await asyncio.gather(*crowd.tasks)
        assert not crowd.errors
        assert len(crowd.ended) == len(crowd.tasks)
        flood = [name for name in crowd.ended if name.startswith("flood")]
        assert crowd.ended.index("urgent") < crowd.ended.index(flood[6])
        assert crowd.ended.index("other") < crowd.ended.index(flood[6])

    deploy(scenario, role=TINY, router=hold(100), frontend=FRONTEND)
