"""What one worker does with the requests of its frontends, the engine driven by hand."""

import asyncio
import threading

from penstock.core.ids import RequestId
from penstock.core.types.requests import FinishReason
from tests.support.scenes import run_by
from tests.support.worker_stage import Stage, make_request, run_scenario, settle


@run_by(run_scenario)
async def test_an_abort_reaches_the_engine_and_later_deltas_are_dropped(stage: Stage):
    sink = stage.sink()
    stage.worker.submit(make_request("a"), sink)
    stage.engine.emit("a", 1)  # of a step under way
    stage.worker.abort(RequestId("a"), sink)
    stage.worker.abort(RequestId("unknown"), sink)
    assert stage.engine.aborted == ["a"]
    await settle()
    assert not sink.frames


@run_by(run_scenario)
async def test_only_its_own_frontend_aborts_a_request(stage: Stage):
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


@run_by(run_scenario)
async def test_a_second_request_of_the_same_id_is_refused(stage: Stage):
    first, second = stage.sink(), stage.sink()
    stage.worker.submit(make_request("a"), first)
    stage.worker.submit(make_request("a"), second)
    assert second.error("a") == "invalid_request_error"
    assert list(stage.engine.requests) == ["a"]
    stage.worker.submit(make_request("a"), first)  # it could not tell the two apart
    assert first.error("a") == "invalid_request_error"
    assert not stage.engine.requests


@run_by(run_scenario)
async def test_a_deadline_ends_the_request(stage: Stage):
    sink = stage.sink()
    stage.worker.submit(make_request("a", deadline_s=3.0), sink)
    stage.worker.submit(make_request("b", deadline_s=3.0), sink)
    stage.engine.emit("b", 1, finish=FinishReason.STOP)
    await asyncio.sleep(2.9)
    assert list(stage.engine.requests) == ["a"]
    await asyncio.sleep(0.2)
    assert sink.error("a") == "deadline_exceeded"
    assert stage.engine.aborted == ["a"]


@run_by(run_scenario)
async def test_odd_deadlines_are_refused_or_never_come(stage: Stage):
    sink = stage.sink()
    stage.worker.submit(make_request("nan", deadline_s=float("nan")), sink)
    assert sink.error("nan") == "invalid_request_error"
    for name, deadline_s in (("inf", float("inf")), ("long", 1e300)):
        stage.worker.submit(make_request(name, deadline_s=deadline_s), sink)
    stage.worker.submit(make_request("late", deadline_s=-1.0), sink)
    await asyncio.sleep(1.0)
    assert sink.error("late") == "deadline_exceeded"
    assert list(stage.engine.requests) == ["inf", "long"]


def test_files_are_read_by_hash_beside_the_loop():
    def read_file(sha256: str) -> bytes | None:
        return b"content" if sha256 == "abc" and threading.get_ident() != here else None

    async def main() -> None:  # on a loop that has threads, as the simulated one has not
        worker = Stage(read_file=read_file).worker
        assert [await worker.read_file(name) for name in ("abc", "other")] == [b"content", None]

    here = threading.get_ident()
    asyncio.run(main())
