"""Requests that make steps fail, or end worker after worker, beside others that do no harm; real schedulers, virtual time."""

import asyncio
import logging

import pytest
import structlog

from penstock.core.errors import Unavailable
from penstock.engine.batched import BatchedEngine
from penstock.engine.mock import MockConfig, MockRunner
from penstock.engine.runner import RunnerInfo
from tests.support.cluster import MemoryCluster
from tests.support.kv_transfer import TIMING, tiny_request, whole_answer

NUM_INNOCENTS = 6
SHAPE = RunnerInfo(num_blocks=200, block_size=4, context_length=400, vocab_size=500)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Leave the many tracebacks out: formatting them takes longer than the tests."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


class PoisonableRunner(MockRunner):
    """Calls `strike` before each step that computes a request called poison, past `from_tokens` of it."""

    def __init__(self, strike, from_tokens):
        super().__init__(SHAPE, MockConfig(timing=TIMING, answer_tokens=1000))
        self._strike = strike
        self._from_tokens = from_tokens

    async def run(self, plan, table):
        for slot in plan.slots.tolist():
            request = table.requests[slot]
            is_poison = request is not None and "poison" in request.request_id
            if is_poison and table.num_tokens[slot] > self._from_tokens:
                await self._strike()
        return await super().run(plan, table)


class Workers:
    """Workers whose engines a request called poison makes fail a step of, or (`is_deadly`) ends at once, to be replaced."""

    def __init__(self, cluster, group, *, is_deadly, from_tokens):
        self.cluster = cluster
        self.group = group
        self.is_deadly = is_deadly
        self.from_tokens = from_tokens
        self.strikes = 0

    async def add(self, name):
        async def strike():
            self.strikes += 1
            if not self.is_deadly:
                raise RuntimeError("the device fell over")
            self.cluster.kill(name)
            self.group.create_task(self.add(f"{name}'"))
            await asyncio.sleep(100)

        await self.cluster.start(name, BatchedEngine(PoisonableRunner(strike, self.from_tokens)))


def innocent(number):
    return tiny_request(f"innocent-{number}", length=40, max_tokens=150, seed=number + 1)


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize(
    ("is_deadly", "from_tokens"),
    [(False, 60), (True, 0), pytest.param(True, 60, marks=pytest.mark.nightly)],
    ids=["steps fail later", "workers die at once", "workers die later"],
)
@pytest.mark.virtual
async def test_a_request_that_fails_wherever_it_goes_ends_soon_and_takes_nobody_with_it(
    num_workers, is_deadly, from_tokens
):
    """`later`: it is fine until it has some tokens, and then never again."""
    async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher, asyncio.TaskGroup() as group:
        workers = Workers(cluster, group, is_deadly=is_deadly, from_tokens=from_tokens)
        for number in range(num_workers):
            await workers.add(f"w{number}")
        await asyncio.sleep(0.1)
        expected = {n: (await whole_answer(dispatcher, innocent(n)))[0] for n in range(NUM_INNOCENTS)}
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as beside:
            answers = {n: beside.create_task(whole_answer(dispatcher, innocent(n))) for n in expected}
            await asyncio.sleep(0.3)
            begun_s = loop.time()
            with pytest.raises(Unavailable, match="refused for 60 s") as caught:
                await whole_answer(dispatcher, tiny_request("poison", length=50, max_tokens=100, seed=77))
            assert loop.time() - begun_s < 8.0
        assert caught.value.http_status == 503
        assert workers.strikes <= 3 + bool(from_tokens), "a loss that it got many tokens before says nothing"
        for number, tokens in expected.items():
            assert answers[number].result()[0] == tokens
            assert (await whole_answer(dispatcher, innocent(number)))[0] == tokens, "nobody else is blamed"
        await asyncio.sleep(0.5)
        dispatcher.check()
        assert not any(worker.open_requests for worker in dispatcher.workers())
