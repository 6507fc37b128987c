"""A request that is run: its sink gets each delta in the turn of the loop that brings it."""

import asyncio

import pytest

from penstock.core.errors import DeadlineExceeded
from penstock.core.types.requests import Delta, FinishReason
from penstock.router.dispatch.open_request import OpenRequest
from tests.unit.router.dispatch.test_dispatcher import ids, make_request, scenario, settle


class Taken:
    """Notes what it takes; holds the stream where told to."""

    def __init__(self, stream: OpenRequest) -> None:
        self.stream = stream
        self.deltas: list[list[int]] = []
        self.holds = asyncio.Event()
        self.holds_after: int | None = None
        self.stops_after: int | None = None
        self.fails_after: int | None = None
        self.tasks: set[asyncio.Task | None] = set()

    def __call__(self, delta: Delta):
        self.deltas.append(ids(delta))
        self.tasks.add(asyncio.current_task())
        count = len(self.deltas)
        if count == self.fails_after:
            raise ConnectionResetError("the client is gone")
        if count == self.stops_after:
            self.stream.stop()
        return self.holds.wait if count == self.holds_after else None


@scenario(1)
async def test_deltas_are_taken_as_they_arrive_and_without_the_readers_task(setting):
    async with setting.dispatcher.open(make_request()) as stream:
        await settle()
        engine = setting.engines[setting.holder()]
        taken = Taken(stream)
        running = asyncio.create_task(stream.run(taken))
        await settle()
        for token in (1, 2, 3):
            engine.emit("r", token)
            await settle()
        assert taken.deltas == [[1], [2], [3]]
        assert running not in taken.tasks
        engine.emit("r", 4, finish=FinishReason.LENGTH)
        await running
    assert taken.deltas == [[1], [2], [3], [4]]


@scenario(1)
async def test_deltas_are_merged_while_the_sink_waits(setting):
    async with setting.dispatcher.open(make_request()) as stream:
        await settle()
        engine = setting.engines[setting.holder()]
        taken = Taken(stream)
        taken.holds_after = 1
        running = asyncio.create_task(stream.run(taken))
        for token in (1, 2, 3):
            engine.emit("r", token)
            await settle()
        assert taken.deltas == [[1]]
        taken.holds.set()
        await settle()
        assert taken.deltas == [[1], [2, 3]]
        taken.holds.clear()
        taken.holds_after = 3
        engine.emit("r", 4)
        await settle()
        engine.emit("r", 5, finish=FinishReason.LENGTH)
        await settle()
        assert not running.done(), "the end waits as well"
        taken.holds.set()
        await running
    assert taken.deltas == [[1], [2, 3], [4], [5]]


@scenario(1)
async def test_what_a_sink_raises_ends_its_request_and_no_other(setting):
    async def read(request_id: str, fails_after: int | None) -> list[list[int]]:
        async with setting.dispatcher.open(make_request(request_id)) as stream:
            taken = Taken(stream)
            taken.fails_after = fails_after
            await stream.run(taken)
        return taken.deltas

    failing = asyncio.create_task(read("a", 2))
    whole = asyncio.create_task(read("b", None))
    await settle()
    (engine,) = setting.engines.values()
    for token in (1, 2, 3):
        for request_id in ("a", "b"):
            if request_id in engine.requests:
                engine.emit(request_id, token)
        await settle()
    with pytest.raises(ConnectionResetError, match="the client is gone"):
        await failing
    await settle()
    assert list(engine.requests) == ["b"]
    engine.emit("b", 4, finish=FinishReason.LENGTH)
    assert await whole == [[1], [2], [3], [4]]


@scenario(1)
async def test_a_deadline_ends_a_run_also_while_its_sink_waits(setting):
    async with setting.dispatcher.open(make_request(deadline_s=5.0)) as stream:
        await settle()
        setting.engines[setting.holder()].emit("r", 1)
        taken = Taken(stream)
        with pytest.raises(DeadlineExceeded, match="5 s have passed"):
            await stream.run(taken)
    assert taken.deltas == [[1]]
