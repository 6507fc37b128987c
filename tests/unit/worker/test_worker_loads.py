"""What one worker tells its frontends of its load and of each other, the engine driven by hand."""

import asyncio
from collections.abc import Sequence

from penstock.core.errors import Overloaded
from penstock.core.ids import RequestId
from penstock.core.types.events import BlockStored, EventMessage
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta, FinishReason
from penstock.core.wire import pack_hashes
from tests.support.scenes import run_by
from tests.support.worker_stage import Sink, Stage, make_request, run_scenario, settle


@run_by(run_scenario)
async def test_loads_say_which_requests_they_include(stage: Stage):
    first, second = stage.sink(), stage.sink()
    assert [(load.running_requests, load.accepted_requests) for load in first.loads] == [(0, 0)]
    stage.worker.submit(make_request("a"), first)
    assert (first.loads[-1].running_requests, first.loads[-1].accepted_requests) == (1, 1)
    assert (second.loads[-1].running_requests, second.loads[-1].accepted_requests) == (1, 0)
    stage.engine.refusal = Overloaded("full")
    stage.worker.submit(make_request("b"), first)
    await asyncio.sleep(0.06)
    stage.engine.emit("a", 1)
    await settle()
    assert first.loads[-1].accepted_requests == 2  # a refused request is not waiting either


@run_by(run_scenario)
async def test_what_comes_and_goes_is_told_soon_and_busy_and_idle_at_once(stage: Stage):
    sink = stage.sink()
    stage.worker.submit(make_request("r0"), sink)
    assert sink.loads[-1].running_requests == 1
    for number in range(1, 21):
        stage.worker.submit(make_request(f"r{number}"), sink)
        await asyncio.sleep(0.01)
    assert 4 <= len(sink.loads) <= 7
    await asyncio.sleep(0.05)
    assert sink.loads[-1].running_requests == 21
    for number in range(21):
        stage.engine.emit(f"r{number}", 1, finish=FinishReason.STOP)
    await settle()
    assert sink.loads[-1].running_requests == 0
    told = len(sink.loads)
    await asyncio.sleep(10)
    assert len(sink.loads) == told  # idle workers are silent


@run_by(run_scenario)
async def test_blocks_that_an_abort_frees_with_the_step_are_told_at_once(stage: Stage):
    sink = stage.sink()
    stage.worker.submit(make_request("a"), sink)
    await asyncio.sleep(1)
    stage.engine.lingering_blocks = 3
    stage.worker.abort(RequestId("a"), sink)
    await settle()
    stage.engine.lingering_blocks = 0
    stage.engine.step()
    await settle()
    assert sink.loads[-1].active_blocks == 0


@run_by(run_scenario)
async def test_what_an_answer_left_behind_is_told_before_its_end(stage: Stage):
    class OrderedSink(Sink):
        def __init__(self) -> None:
            super().__init__()
            self.order: list[str] = []

        def push(self, deltas: Sequence[Delta]) -> None:
            self.order.append("deltas")

        def push_load(self, load: WorkerLoad) -> None:
            self.order.append("load" if load.running_requests else "idle")

        def push_event(self, message: EventMessage) -> None:
            self.order.append("event")

    sink = OrderedSink()
    stage.worker.connected(sink)
    stage.worker.events().subscribe(sink)
    stage.worker.submit(make_request("a"), sink)
    stored = BlockStored(block_hashes=pack_hashes([1, 2]), parent_block_hash=None, block_size=4)
    end = Delta(request_id=RequestId("a"), finish_reason=FinishReason.STOP)
    stage.engine.step(deltas=[end], events=[stored])
    await settle()
    assert sink.order == ["idle", "load", "event", "idle", "deltas"]


@run_by(run_scenario)
async def test_what_one_frontend_sends_the_others_hear_with_the_next_turn(stage: Stage):
    first, second = stage.sink(), stage.sink()
    for number in range(3):
        stage.worker.submit(make_request(f"r{number}"), first)
    told = len(second.loads)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(second.loads) <= told + 1, "those of one turn are told together"
    load = second.loads[-1]
    assert (load.peers, load.peer_requests, load.peer_prefill_tokens) == (1, 3, 15)
    assert first.loads[-1].peer_requests == 0
    stage.worker.disconnected(first)
    await asyncio.sleep(0.06)
    load = second.loads[-1]
    assert (load.peers, load.peer_requests, load.peer_prefill_tokens, load.peer_arrivals) == (0, 0, 0, 3)
