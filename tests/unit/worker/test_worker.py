"""What one worker does with its engine and its frontends, the engine driven by hand."""

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from penstock.core.errors import ConfigError, EngineError, Overloaded, RequestError
from penstock.core.hashing import block_hashes
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types import (
    BlockStored,
    CardFile,
    Delta,
    EngineInfo,
    EventBatch,
    EventMessage,
    EventSnapshot,
    FinishReason,
    InstancePut,
    InstanceState,
    Request,
    SamplingParams,
    WatchSynced,
    WorkerLoad,
)
from penstock.core.wire import pack_hashes, pack_tokens
from penstock.runtime.discovery.memory import MemoryDiscovery
from penstock.runtime.requests.memory import MemoryPlane
from penstock.sim.loop import run_virtual
from penstock.testing.cluster import small_card
from penstock.testing.hand_engine import HandEngine
from penstock.worker import files
from penstock.worker.config import WorkerConfig
from penstock.worker.worker import Worker, WorkerIdentity


class Sink:
    """One frontend: keeps what it is sent."""

    def __init__(self) -> None:
        self.frames: list[tuple[Delta, ...]] = []
        self.loads: list[WorkerLoad] = []
        self.events: list[EventMessage] = []

    def push(self, deltas: Sequence[Delta]) -> None:
        self.frames.append(tuple(deltas))

    def push_load(self, load: WorkerLoad) -> None:
        self.loads.append(load)

    def push_event(self, message: EventMessage) -> None:
        self.events.append(message)

    def error(self, request_id: str) -> str:
        """Give the code of the error a request ended with."""
        (delta,) = (
            d for frame in self.frames for d in frame if d.request_id == request_id and d.error is not None
        )
        assert delta.finish_reason is FinishReason.ERROR
        return delta.error.code


def make_request(request_id: str, *, tokens: tuple[int, ...] = (1, 2, 3, 4, 5), **fields: object) -> Request:
    return Request(
        request_id=RequestId(request_id),
        model="tiny",
        token_ids=pack_tokens(tokens),
        block_hashes=fields.pop("hashes", pack_hashes(block_hashes(tokens, 4))),
        sampling=SamplingParams(max_tokens=9),
        **fields,
    )


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Stage:
    def __init__(
        self,
        config: WorkerConfig | None = None,
        read_file: Callable[[str], bytes | None] = {"abc": b"content"}.get,
    ) -> None:
        self.engine = HandEngine()
        self.discovery = MemoryDiscovery()
        self.worker = Worker(
            self.engine,
            self.discovery,
            MemoryPlane(),
            identity=WorkerIdentity(WorkerId(7), "w1"),
            card=small_card(),
            read_file=read_file,
            config=config,
        )
        self.error: BaseException | None = None

    def sink(self) -> Sink:
        sink = Sink()
        self.worker.connected(sink)
        return sink

    def state(self) -> InstanceState | None:
        (instance,) = self.discovery._table.values() or (None,)
        return None if instance is None else instance.state

    async def run(self) -> None:
        try:
            await self.worker.run()
        except EngineError as error:
            self.error = error


def play(scene: Callable[[Stage], Awaitable[None]], config: WorkerConfig | None = None) -> None:
    async def main() -> None:
        stage = Stage(config)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(stage.run())
            await stage.worker.ready.wait()
            await scene(stage)
            stage.worker.check()
            stage.worker.stop()
            await asyncio.sleep(100)
            assert running.done()
        assert stage.engine.closed
        assert not len(stage.discovery._table)

    run_virtual(main())


def test_one_frame_carries_all_deltas_of_a_step_for_one_frontend():
    async def scene(stage: Stage) -> None:
        first, second = stage.sink(), stage.sink()
        for name in ("a", "b"):
            stage.worker.submit(make_request(name), first)
        stage.worker.submit(make_request("c"), second)
        deltas = {
            name: Delta(request_id=RequestId(name), token_ids=pack_tokens([1]), finish_reason="stop")
            for name in "abc"
        }
        stage.engine.step(deltas=tuple(deltas.values()))
        await settle()
        assert first.frames == [(deltas["a"], deltas["b"])]
        assert second.frames == [(deltas["c"],)]

    play(scene)


def test_an_abort_reaches_the_engine_and_later_deltas_are_dropped():
    async def scene(stage: Stage) -> None:
        sink = stage.sink()
        stage.worker.submit(make_request("a"), sink)
        stage.engine.emit("a", 1)  # of a step under way
        stage.worker.abort(RequestId("a"), sink)
        stage.worker.abort(RequestId("unknown"), sink)
        assert stage.engine.aborted == ["a"]
        await settle()
        assert not sink.frames

    play(scene)


def test_only_its_own_frontend_aborts_a_request():
    async def scene(stage: Stage) -> None:
        owner, other = stage.sink(), stage.sink()
        stage.worker.submit(make_request("a"), owner)
        stage.worker.abort(RequestId("a"), other)
        assert stage.engine.aborted == []
        stage.engine.emit("a", 1)
        await settle()
        assert len(owner.frames) == 1
        stage.worker.disconnected(other)
        stage.worker.abort(RequestId("a"), other)  # of a connection that ended within the same turn
        assert stage.engine.aborted == []
        stage.worker.abort(RequestId("a"), owner)
        assert stage.engine.aborted == ["a"]

    play(scene)


def test_requests_of_a_frontend_that_is_gone_are_aborted():
    async def scene(stage: Stage) -> None:
        first, second = stage.sink(), stage.sink()
        stage.worker.submit(make_request("a"), first)
        stage.worker.submit(make_request("b"), second)
        stage.worker.disconnected(first)
        stage.worker.disconnected(first)
        assert stage.engine.aborted == ["a"]
        stage.worker.check()
        loads = len(first.loads)
        stage.engine.emit("b", 1, finish=FinishReason.STOP)
        await asyncio.sleep(1)
        assert len(first.loads) == loads

    play(scene)


def test_a_refusal_is_a_delta():
    async def scene(stage: Stage) -> None:
        sink = stage.sink()
        stage.engine.refusal = RequestError("too long", param="messages")
        stage.worker.submit(make_request("a"), sink)
        stage.engine.refusal = KeyError("a bug")
        stage.worker.submit(make_request("b"), sink)
        stage.engine.refusal = None
        stage.worker.submit(make_request("c", hashes=b""), sink)
        assert [sink.error(name) for name in "abc"] == [
            "invalid_request_error",
            "engine_error",
            "invalid_request_error",
        ]
        assert not stage.engine.requests

    play(scene)


def test_a_second_request_of_the_same_id_is_refused():
    async def scene(stage: Stage) -> None:
        first, second = stage.sink(), stage.sink()
        stage.worker.submit(make_request("a"), first)
        stage.worker.submit(make_request("a"), second)
        assert second.error("a") == "invalid_request_error"
        assert list(stage.engine.requests) == ["a"]
        stage.worker.submit(make_request("a"), first)  # it could not tell the two apart
        assert first.error("a") == "invalid_request_error"
        assert not stage.engine.requests

    play(scene)


def test_a_deadline_ends_the_request():
    async def scene(stage: Stage) -> None:
        sink = stage.sink()
        stage.worker.submit(make_request("a", deadline_s=3.0), sink)
        stage.worker.submit(make_request("b", deadline_s=3.0), sink)
        stage.engine.emit("b", 1, finish=FinishReason.STOP)
        await asyncio.sleep(2.9)
        assert list(stage.engine.requests) == ["a"]
        await asyncio.sleep(0.2)
        assert sink.error("a") == "deadline_exceeded"
        assert stage.engine.aborted == ["a"]

    play(scene)


def test_odd_deadlines_are_refused_or_never_come():
    async def scene(stage: Stage) -> None:
        sink = stage.sink()
        stage.worker.submit(make_request("nan", deadline_s=float("nan")), sink)
        assert sink.error("nan") == "invalid_request_error"
        for name, deadline_s in (("inf", float("inf")), ("long", 1e300)):
            stage.worker.submit(make_request(name, deadline_s=deadline_s), sink)
        stage.worker.submit(make_request("late", deadline_s=-1.0), sink)
        await asyncio.sleep(1.0)
        assert sink.error("late") == "deadline_exceeded"
        assert list(stage.engine.requests) == ["inf", "long"]

    play(scene)


def test_loads_say_which_requests_they_include():
    async def scene(stage: Stage) -> None:
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

    play(scene)


def test_what_comes_and_goes_is_told_soon_and_busy_and_idle_at_once():
    async def scene(stage: Stage) -> None:
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

    play(scene)


def test_a_busy_worker_where_nothing_changes_reports_now_and_then():
    async def scene(stage: Stage) -> None:
        sink = stage.sink()
        stage.worker.submit(make_request("a"), sink)
        told = len(sink.loads)
        for _ in range(300):
            stage.engine.emit("a", 1)
            await asyncio.sleep(0.01)
        await asyncio.sleep(2.5)  # a long step
        assert len(sink.loads) == told + 5

    play(scene)


def test_blocks_that_an_abort_frees_with_the_step_are_told_at_once():
    async def scene(stage: Stage) -> None:
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

    play(scene)


def test_what_an_answer_left_behind_is_told_before_its_end():
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

    async def scene(stage: Stage) -> None:
        sink = OrderedSink()
        stage.worker.connected(sink)
        stage.worker.subscribe(sink)
        stage.worker.submit(make_request("a"), sink)
        stored = BlockStored(block_hashes=pack_hashes([1, 2]), parent_block_hash=None, block_size=4)
        end = Delta(request_id=RequestId("a"), finish_reason=FinishReason.STOP)
        stage.engine.step(deltas=[end], events=[stored])
        await settle()
        assert sink.order == ["idle", "load", "event", "idle", "deltas"]

    play(scene)


def test_a_burst_of_submissions_is_reported_within_the_interval():
    async def scene(stage: Stage) -> None:
        sink = stage.sink()
        for number in range(5):
            stage.worker.submit(make_request(f"r{number}"), sink)
        assert sink.loads[-1].accepted_requests == 1
        await asyncio.sleep(0.051)
        assert sink.loads[-1].accepted_requests == 5
        assert len(sink.loads) == 3

    play(scene)


def test_events_are_numbered_and_replayed():
    async def scene(stage: Stage) -> None:
        sink = stage.sink()
        stage.worker.subscribe(sink)
        stored = BlockStored(block_hashes=pack_hashes([1, 2]), parent_block_hash=None, block_size=4)
        stage.engine.step(events=[stored])
        stage.engine.step()
        await settle()
        assert sink.events == [EventBatch(sequence=1, events=(stored,))]
        assert list(stage.worker.events_after(0)) == sink.events
        (snapshot,) = filter(None, stage.worker.events_after(None))
        assert isinstance(snapshot, EventSnapshot)
        stage.worker.unsubscribe(sink)
        stage.engine.step(events=[stored])
        await settle()
        assert len(sink.events) == 1

    play(scene)


def test_files_are_read_by_hash():
    async def scene(stage: Stage) -> None:
        assert await stage.worker.read_file("abc") == b"content"
        assert await stage.worker.read_file("other") is None

    play(scene)


def test_files_are_read_and_hashed_beside_the_loop(tmp_path, monkeypatch):
    content, threads = b"content", []
    sha256 = hashlib.sha256(content).hexdigest()
    (tmp_path / "config.json").write_bytes(content)

    class Hashing:
        @staticmethod
        def sha256(data: bytes) -> Any:
            threads.append(threading.get_ident())
            return hashlib.sha256(data)

    monkeypatch.setattr(files, "hashlib", Hashing)
    card_file = CardFile(name="config.json", sha256=sha256, size_bytes=len(content))

    async def main() -> None:  # on a loop that has threads, as the simulated one has not
        stage = Stage(read_file=files.ModelFiles(tmp_path, [card_file]).read)
        assert await stage.worker.read_file(sha256) == content
        assert len(threads) == 1
        assert threads[0] != threading.get_ident()

    asyncio.run(main())


def test_draining_is_announced_then_refuses_then_ends():
    async def scene(stage: Stage) -> None:
        sink = stage.sink()
        stage.worker.submit(make_request("a"), sink)
        stage.worker.stop()
        stage.worker.stop()
        await settle()
        assert stage.state() is InstanceState.DRAINING
        stage.worker.submit(make_request("b"), sink)  # sent before its frontend could know
        await asyncio.sleep(0.2)
        stage.worker.submit(make_request("c"), sink)
        assert sink.error("c") == "overloaded"
        stage.engine.emit("a", 1, finish=FinishReason.STOP)
        await asyncio.sleep(1)
        assert len(stage.discovery._table) == 1
        stage.engine.emit("b", 1, finish=FinishReason.STOP)
        await asyncio.sleep(0.1)
        assert not len(stage.discovery._table)
        assert stage.error is None

    play(scene)


def test_what_outlasts_the_drain_is_handed_over():
    async def scene(stage: Stage) -> None:
        sink = stage.sink()
        stage.worker.submit(make_request("a"), sink)
        stage.worker.stop()
        await asyncio.sleep(5.5)
        assert sink.error("a") == "unavailable"
        assert stage.engine.aborted == ["a"]
        assert stage.engine.closed

    play(scene, WorkerConfig(drain_timeout_s=5.0))


@pytest.mark.parametrize("problem", [RuntimeError("CUDA is gone"), None])
@pytest.mark.parametrize("draining", [False, True])
def test_a_dead_engine_ends_the_worker_with_an_error(problem, draining):
    async def scene(stage: Stage) -> None:
        sink = stage.sink()
        stage.worker.submit(make_request("a"), sink)
        if draining:
            stage.worker.stop()
            await asyncio.sleep(1)
        stage.engine.die(problem)
        await settle()
        assert sink.error("a") == "worker_lost"
        stage.worker.submit(make_request("b"), sink)
        assert sink.error("b") == "worker_lost"
        await asyncio.sleep(1)
        assert isinstance(stage.error, EngineError)
        assert "worker w1: the engine ended" in str(stage.error)
        assert stage.error.__cause__ is problem
        assert not len(stage.discovery._table)

    play(scene)


def test_a_card_that_does_not_fit_the_engine_is_a_config_error():
    async def main() -> None:
        stage = Stage()
        stage.engine.info = EngineInfo(
            block_size=16, total_blocks=9, context_length=99, max_batch_tokens=9, max_running_requests=9
        )
        with pytest.raises(ConfigError, match="the model card says 4 tokens and the engine 16"):
            await stage.worker.run()
        assert stage.engine.closed

    run_virtual(main())


def test_the_smaller_context_is_the_one_announced():
    async def main() -> None:
        stage = Stage()
        stage.engine.info = EngineInfo(
            block_size=4, total_blocks=9, context_length=36, max_batch_tokens=9, max_running_requests=9
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(stage.run())
            async for change in stage.discovery.watch():
                if isinstance(change, InstancePut):
                    assert change.instance.card.context_length == 36
                    break
                assert isinstance(change, WatchSynced)
            stage.worker.stop()

    run_virtual(main())


def test_an_engine_that_cannot_start_leaves_nothing():
    async def main() -> None:
        stage = Stage()
        stage.engine.start_error = ConfigError("no weights")
        with pytest.raises(ConfigError, match="no weights"):
            await stage.worker.run()
        assert stage.engine.closed
        assert not len(stage.discovery._table)

    run_virtual(main())


def test_what_one_frontend_sends_the_others_hear_with_the_next_turn():
    async def scene(stage: Stage) -> None:
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

    play(scene)


def test_a_request_sent_without_knowing_of_others_comes_back_behind_the_load_it_lacked():
    async def scene(stage: Stage) -> None:
        first, second = stage.sink(), stage.sink()
        stage.worker.submit(make_request("a", known_peer_arrivals=0), first)
        seen = []
        second.push_load = seen.append
        second.push = seen.extend
        stage.worker.submit(make_request("b", known_peer_arrivals=0), second)
        load, delta = seen[-2:]
        assert (load.peer_arrivals, load.accepted_requests) == (1, 1)
        assert delta.error.code == "outrun"
        assert "1 requests" in delta.error.message
        stage.worker.submit(make_request("b", known_peer_arrivals=1), second)
        stage.worker.submit(make_request("c"), second)
        assert list(stage.engine.requests) == ["a", "b", "c"]

    play(scene)
