"""Dispatcher and workers over real sockets: what virtual time and memory planes cannot show."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.requests import Delta, FinishReason, Request, SamplingParams
from penstock.core.wire import num_tokens, pack_tokens, unpack_tokens
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.runtime.discovery.memory import MemoryDiscovery
from penstock.runtime.handshake import Identity
from penstock.runtime.requests.tcp import TcpPlane
from penstock.testing.loop import run_async
from penstock.worker.identity import WorkerIdentity
from penstock.worker.worker import Worker
from tests.support.cluster import small_card
from tests.support.manual_engine import ManualEngine

Scene = Callable[[Dispatcher, list[ManualEngine], list[Worker]], Awaitable[None]]


@asynccontextmanager
async def deployment(num_workers: int) -> AsyncIterator[tuple[Dispatcher, list[ManualEngine], list[Worker]]]:
    discovery = MemoryDiscovery()
    engines = [ManualEngine() for _ in range(num_workers)]
    workers = [
        Worker(
            engine,
            discovery,
            TcpPlane(Identity(worker_id=WorkerId(number))),
            identity=WorkerIdentity(WorkerId(number), f"w{number}"),
            card=small_card(),
            read_file={}.get,
        )
        for number, engine in enumerate(engines, start=1)
    ]
    async with asyncio.TaskGroup() as group:
        for worker in workers:
            group.create_task(worker.run())
        async with Dispatcher(discovery, TcpPlane(), rng=random.Random(1)) as dispatcher:
            await until(lambda: sum(w.condition == "ready" for w in dispatcher.workers()) == num_workers)
            yield dispatcher, engines, workers
            for worker in workers:
                worker.stop()
            await until(lambda: not dispatcher.workers())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - it polls what has no event
            await asyncio.sleep(0.002)


def run_scenario(scene: Scene, num_workers: int = 1) -> None:
    async def main() -> None:
        async with deployment(num_workers) as parts:
            await scene(*parts)

    run_async(main())


def make_request(request_id: str = "r", prompt: tuple[int, ...] = (1, 2, 3, 4, 5)) -> Request:
    return Request(
        request_id=RequestId(request_id),
        model="tiny",
        token_ids=pack_tokens(prompt),
        sampling=SamplingParams(max_tokens=10_000),
        salt=b"tiny-1",
        deadline_s=60.0,
    )


def emit_many(engine: ManualEngine, first: int, last: int, *, finish: bool = False) -> None:
    for token in range(first, last):
        done = finish and token == last - 1
        engine.emit("r", token, finish=FinishReason.LENGTH if done else None)


def test_a_reader_that_stalls_is_sent_its_window_and_later_everything():
    async def scene(dispatcher: Dispatcher, engines: list[ManualEngine], workers: list[Worker]) -> None:
        (engine,) = engines
        async with dispatcher.open(make_request()) as stream:
            await until(lambda: engine.requests)
            emit_many(engine, 0, 4000)
            await asyncio.sleep(0.2)
            assert stream.output_tokens == 512  # PlaneConfig.window_tokens
            emit_many(engine, 4000, 6000, finish=True)
            received = [token async for delta in stream for token in unpack_tokens(delta.token_ids).tolist()]
            assert received == list(range(6000))

    run_scenario(scene)


def test_a_cancel_reaches_the_engine_while_another_stream_goes_on():
    async def scene(dispatcher: Dispatcher, engines: list[ManualEngine], workers: list[Worker]) -> None:
        (engine,) = engines
        async with dispatcher.open(make_request("other")) as other:
            async with dispatcher.open(make_request()):
                await until(lambda: len(engine.requests) == 2)
                left_s = asyncio.get_running_loop().time()
            await until(lambda: engine.aborted == ["r"])
            assert asyncio.get_running_loop().time() - left_s < 1  # a few ms on an idle machine
            engine.emit("other", 7, finish=FinishReason.STOP)
            assert [delta.finish_reason async for delta in other] == [FinishReason.STOP]

    run_scenario(scene)


def test_a_stream_moves_when_its_connection_breaks():
    async def scene(dispatcher: Dispatcher, engines: list[ManualEngine], workers: list[Worker]) -> None:
        async with dispatcher.open(make_request()) as stream:
            await until(lambda: any(engine.requests for engine in engines))
            first, second = sorted(engines, key=lambda engine: not engine.requests)
            first.emit("r", 1)
            assert unpack_tokens((await anext(stream)).token_ids).tolist() == [1]
            stream._attempt.connection.channel.abort("the test cut it")
            reading = asyncio.ensure_future(anext(stream))
            await until(lambda: second.requests)
            await until(lambda: first.aborted == ["r"])
            assert second.submitted[0].num_emitted == 1
            assert num_tokens(second.submitted[0].token_ids) == 6
            second.emit("r", 2, finish=FinishReason.STOP)
            delta: Delta = await reading
            assert unpack_tokens(delta.token_ids).tolist() == [2]
        assert stream.migrations == 1
        # the worker is well: it is connected to again
        await until(lambda: all(worker.condition == "ready" for worker in dispatcher.workers()))
        dispatcher.check()

    run_scenario(scene, num_workers=2)


def test_a_worker_that_drains_finishes_its_streams():
    async def scene(dispatcher: Dispatcher, engines: list[ManualEngine], workers: list[Worker]) -> None:
        (engine,) = engines
        async with dispatcher.open(make_request()) as stream:
            await until(lambda: engine.requests)
            workers[0].stop()
            await until(lambda: dispatcher.workers()[0].condition == "draining")
            assert not dispatcher.models()
            emit_many(engine, 0, 300, finish=True)
            received = [token async for delta in stream for token in unpack_tokens(delta.token_ids).tolist()]
            assert received == list(range(300))

    run_scenario(scene)
