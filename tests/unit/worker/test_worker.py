"""What one worker does with the requests of its frontends, the engine driven by hand."""

import asyncio
import hashlib
import threading
from typing import Any

from msgspec.structs import replace

from penstock.core.errors import RequestError
from penstock.core.ids import RequestId
from penstock.core.types.cards import CardFile
from penstock.core.types.events import BlockStored, EventBatch, EventSnapshot
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import pack_hashes, pack_tokens
from penstock.worker import files
from tests.support.worker_stage import Stage, make_request, run_scenario, settle


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

    run_scenario(scene)


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

    run_scenario(scene)


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

    run_scenario(scene)


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

    run_scenario(scene)


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

    run_scenario(scene)


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

    run_scenario(scene)


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

    run_scenario(scene)


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

    run_scenario(scene)


def test_events_are_numbered_and_replayed():
    async def scene(stage: Stage) -> None:
        sink = stage.sink()
        stage.worker.events().subscribe(sink)
        stored = BlockStored(block_hashes=pack_hashes([1, 2]), parent_block_hash=None, block_size=4)
        stage.engine.step(events=[stored])
        stage.engine.step()
        await settle()
        assert sink.events == [EventBatch(sequence=1, events=(stored,))]
        assert list(stage.worker.events().events_after(0)) == sink.events
        (snapshot,) = filter(None, stage.worker.events().events_after(None))
        assert isinstance(snapshot, EventSnapshot)
        stage.worker.events().unsubscribe(sink)
        stage.engine.step(events=[stored])
        await settle()
        assert len(sink.events) == 1

    run_scenario(scene)


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


def test_a_background_request_runs_alone_or_not_at_all():
    async def scene(stage: Stage) -> None:
        own, other = stage.sink(), stage.sink()

        def background(name: str) -> Request:
            return replace(make_request(name), is_background=True)

        stage.worker.submit(background("early"), own)
        stage.worker.submit(background("second"), other)  # another runs
        assert [delta.request_id for delta in other.frames[-1]] == ["second"]
        stage.worker.submit(make_request("a"), other)
        assert stage.engine.aborted == ["early"]
        (ended,) = own.frames[-1]
        assert (ended.request_id, ended.finish_reason) == ("early", FinishReason.CANCELLED)
        stage.worker.submit(background("late"), own)
        (ended,) = own.frames[-1]
        assert (ended.request_id, ended.finish_reason, ended.error) == ("late", FinishReason.CANCELLED, None)
        assert [request.request_id for request in stage.engine.submitted] == ["early", "a"]
        stage.engine.emit("a", 1, finish=FinishReason.STOP)
        await settle()
        stage.worker.submit(background("again"), own)
        stage.worker.check()
        stage.engine.emit("again", 1, finish=FinishReason.LENGTH)
        await settle()
        assert own.frames[-1][-1].finish_reason is FinishReason.LENGTH
        stage.worker.submit(make_request("b"), other)
        assert stage.engine.aborted == ["early"]

    run_scenario(scene)
