"""How one worker starts, drains and ends, the engine driven by hand."""

import asyncio

import pytest
from structlog.testing import capture_logs

from penstock.core.errors import ConfigError, EngineError
from penstock.core.types.instances import EngineInfo, InstancePut, InstanceState, WatchSynced
from penstock.core.types.requests import FinishReason
from tests.support.scenes import run_by
from tests.support.worker_stage import Stage, make_request, run_scenario, settle


@run_by(run_scenario)
async def test_draining_is_announced_then_refuses_then_ends(stage: Stage):
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
    assert stage.state() is InstanceState.DRAINING
    stage.engine.emit("b", 1, finish=FinishReason.STOP)
    await asyncio.sleep(0.1)
    assert stage.state() is None
    assert stage.error is None


@run_by(run_scenario)
async def test_a_bug_in_abort_ends_nothing_else(stage: Stage):
    def broken(_request_id: str) -> None:
        raise KeyError("no such slot")

    stage.engine.abort = broken
    sink = stage.sink()
    stage.worker.submit(make_request("a"), sink)
    stage.worker.submit(make_request("b"), sink)
    with capture_logs() as logs:
        stage.worker.abort("a", sink)
    assert [(line["event"], line["error"]) for line in logs] == [
        ("engine_abort_failed", "KeyError: 'no such slot'")
    ]
    stage.engine.emit("b", 1, finish=FinishReason.STOP)
    await settle()
    assert sink.frames[-1][-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("problem", [None, RuntimeError("CUDA is gone")])
@run_by(run_scenario)
async def test_what_ended_it_is_told_before_the_engine_closes(stage: Stage, *, problem):
    told = []
    stage.worker.on_closing = lambda cause: told.append((cause, stage.engine.closed))
    if problem is None:
        stage.worker.stop()
    else:
        stage.engine.die(problem)
    await asyncio.sleep(1)
    ((cause, was_closed),) = told
    assert not was_closed
    assert stage.engine.closed
    if problem is None:
        assert cause is None
    else:
        assert "CUDA is gone" in str(cause)


@pytest.mark.parametrize("problem", [RuntimeError("CUDA is gone"), None])
@pytest.mark.parametrize("draining", [False, True])
@run_by(run_scenario)
async def test_a_dead_engine_ends_the_worker_with_an_error(stage: Stage, *, problem, draining):
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
    assert stage.state() is None


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (EngineInfo(16, 9, 99, 9, 9), "the model card says 4 tokens and the engine 16"),
        (None, "gave None; expected an EngineInfo with block_size, context_length"),
        (EngineInfo(4, 9, 0, 9, 9), "expected an EngineInfo with context_length >= 1"),
        (EngineInfo(4, 9, 99, 9, -1), "expected an EngineInfo with max_running_requests >= 1"),
        (ConfigError("no weights"), "no weights"),
    ],
)
@pytest.mark.virtual
async def test_an_engine_that_cannot_start_or_starts_as_none_can_is_a_config_error(info, message):
    stage = Stage()
    if isinstance(info, ConfigError):
        stage.engine.start_error = info
    else:
        stage.engine.info = info
    with pytest.raises(ConfigError, match=message):
        await stage.worker.run()
    assert stage.engine.closed
    assert stage.state() is None


@pytest.mark.virtual
async def test_the_smaller_context_is_the_one_announced():
    stage = Stage()
    stage.engine.info = EngineInfo(4, 9, 36, 9, 9)
    async with asyncio.TaskGroup() as group:
        group.create_task(stage.run())
        async for change in stage.discovery.watch():
            if isinstance(change, InstancePut):
                assert change.instance.card.context_length == 36
                break
            assert isinstance(change, WatchSynced)
        stage.worker.stop()
