"""Requests that make steps fail, or end worker after worker, beside others that do no harm; real schedulers, virtual time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest
import structlog

from penstock.core.errors import Unavailable
from penstock.core.types.requests import FinishReason, Request
from penstock.engine.batched import BatchedEngine
from penstock.engine.runner import Runner
from penstock.engine.scheduling.sequences import Sampled, SequenceTable, StepPlan
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.router.dispatch.open_request import OpenRequest
from penstock.sim.loop.loop import run_virtual
from tests.support.cluster import MemoryCluster
from tests.support.kv_transfer import tiny_engine, tiny_request, whole_answer

NUM_INNOCENTS = 6


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Leave the many tracebacks out: formatting them takes longer than the tests."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


class Poisoned:
    """A `Runner` that calls `strike` before each step that computes a request called poison, past `from_tokens` of it."""

    def __init__(self, inner: Runner, strike: Callable[[], Awaitable[None]], from_tokens: int = 0) -> None:
        self.inner = inner
        self.from_tokens = from_tokens
        self._strike = strike

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    async def run(self, plan: StepPlan, table: SequenceTable) -> Sampled:
        for slot in plan.slots.tolist():
            request = table.requests[slot]
            if (
                request is not None
                and "poison" in request.request_id
                and table.num_tokens[slot] > self.from_tokens
            ):
                await self._strike()
        return await self.inner.run(plan, table)


class Setting:
    """Workers whose engines a request called poison makes fail a step of, or (`is_deadly`) ends at once, to be replaced."""

    def __init__(self, cluster: MemoryCluster, *, is_deadly: bool, from_tokens: int = 0) -> None:
        self.cluster = cluster
        self.is_deadly = is_deadly
        self.from_tokens = from_tokens
        self.strikes = 0
        self.group = asyncio.TaskGroup()

    async def add(self, name: str) -> None:
        async def strike() -> None:
            self.strikes += 1
            if not self.is_deadly:
                raise RuntimeError("the device fell over")
            self.cluster.kill(name)
            self.group.create_task(self.add(f"{name}'"))
            await asyncio.sleep(100)

        engine: BatchedEngine = tiny_engine()
        engine._runner = Poisoned(engine._runner, strike, self.from_tokens)
        await self.cluster.start(name, engine)


def run_scenario(
    scene: Callable[[Setting, Dispatcher], Awaitable[None]],
    num_workers: int,
    *,
    is_deadly: bool,
    from_tokens: int = 0,
) -> None:
    async def main() -> None:
        async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
            setting = Setting(cluster, is_deadly=is_deadly, from_tokens=from_tokens)
            async with setting.group:
                for number in range(num_workers):
                    await setting.add(f"w{number}")
                await asyncio.sleep(0.1)
                await scene(setting, dispatcher)
            await asyncio.sleep(0.5)
            dispatcher.check()
            assert not dispatcher._shared.requests

    run_virtual(main())


def innocent(number: int) -> Request:
    return tiny_request(f"innocent-{number}", length=40, max_tokens=150, seed=number + 1)


async def answer(dispatcher: Dispatcher, request: Request) -> tuple[list[int], OpenRequest]:
    tokens: list[int] = []
    async with dispatcher.open(request) as stream:
        async for delta in stream:
            tokens.extend(memoryview(delta.token_ids).cast("i").tolist())
        assert delta.finish_reason is FinishReason.LENGTH
    return tokens, stream


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("is_deadly", [False, True], ids=["steps fail", "workers die"])
@pytest.mark.parametrize(
    "from_tokens", [pytest.param(0, marks=pytest.mark.slow), 60], ids=["at once", "later"]
)
def test_a_request_that_fails_wherever_it_goes_ends_soon_and_takes_nobody_with_it(
    num_workers: int, from_tokens: int, *, is_deadly: bool
) -> None:
    """`later`: it is fine until it has some tokens, and then never again."""

    async def scene(setting: Setting, dispatcher: Dispatcher) -> None:
        expected = {n: (await whole_answer(dispatcher, innocent(n)))[0] for n in range(NUM_INNOCENTS)}
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            streams = {n: group.create_task(answer(dispatcher, innocent(n))) for n in expected}
            await asyncio.sleep(0.3)
            begun_s = loop.time()
            with pytest.raises(Unavailable, match="refused for 60 s") as caught:
                await answer(dispatcher, tiny_request("poison", length=50, max_tokens=100, seed=77))
            assert loop.time() - begun_s < 8.0
        assert caught.value.http_status == 503
        assert setting.strikes <= 3 + bool(from_tokens), "a loss that it got many tokens before says nothing"
        for number, task in streams.items():
            assert task.result()[0] == expected[number]
        for number, tokens in expected.items():  # nobody else is blamed
            assert (await whole_answer(dispatcher, innocent(number)))[0] == tokens

    run_scenario(scene, num_workers, is_deadly=is_deadly, from_tokens=from_tokens)


def test_a_step_that_fails_once_is_nobodys_error() -> None:
    async def scene(setting: Setting, dispatcher: Dispatcher) -> None:
        expected = (await whole_answer(dispatcher, innocent(0)))[0]
        engine = setting.cluster.engine("w0")
        assert isinstance(engine, BatchedEngine)
        inner, failures = engine._runner, 1

        class Once:
            def __getattr__(self, name: str) -> object:
                return getattr(inner, name)

            async def run(self, plan: StepPlan, table: SequenceTable) -> Sampled:
                nonlocal failures
                if failures and asyncio.get_running_loop().time() > fails_s:
                    failures -= 1
                    raise MemoryError("no room")
                return await inner.run(plan, table)

        fails_s = asyncio.get_running_loop().time() + 0.3
        engine._runner = Once()  # type: ignore[assignment]
        tokens, stream = await answer(dispatcher, innocent(0))
        assert not failures
        assert tokens == expected
        assert stream.migrations == 1

    run_scenario(scene, 1, is_deadly=False)
