import asyncio
import threading

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.core.errors import EngineError, Overloaded, RequestError
from penstock.core.types.requests import FinishReason
from penstock.engine import batched
from penstock.engine.batched import BatchedEngine
from penstock.engine.runner import RunnerInfo, ThreadedRunner
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.sequences import Sampled
from penstock.testing.engines.probe import EngineProbe, make_request

SHAPE = RunnerInfo(num_blocks=32, block_size=4, context_length=64, vocab_size=50)


class Counting:
    """A `BlockingRunner` that samples 1 each time, fails when told to, and notes its threads."""

    def __init__(self):
        self.failures = 0
        self.threads = set()
        self.steps = []
        self.gate = None

    def start(self):
        self.threads.add(threading.get_ident())
        return SHAPE

    def run(self, plan, table):
        self.threads.add(threading.get_ident())
        self.steps.append(len(plan.slots))
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the device fell over")
        return Sampled(np.where(plan.samples, 1, -1).astype(np.int32))

    def kv_memory(self):
        return ()

    def close(self):
        self.threads.add(threading.get_ident())


def engine(runner, **config):
    return BatchedEngine(ThreadedRunner(runner), SchedulerConfig(**config))


async def test_a_failed_step_ends_its_requests_and_the_engine_goes_on():
    runner = Counting()
    async with EngineProbe(engine(runner)) as probe:
        runner.failures = 2
        for number in range(2):
            (answer,) = await probe.run(make_request(f"bad{number}", [1, 2, 3]))
            assert answer.finish_reason is FinishReason.ERROR
            assert answer.error.code == "step_failed"
            assert "RuntimeError: the device fell over" in answer.error.message
        (answer,) = await probe.run(make_request("good", [1, 2, 3], max_tokens=3))
        assert answer.token_ids == [1, 1, 1]
        runner.failures = 2  # the good steps between start the count again
        await probe.run(make_request("bad2", [1, 2, 3]))
        await probe.run(make_request("bad3", [1, 2, 3]))
        probe.engine.scheduler.check()


async def test_a_request_that_fails_again_and_again_does_not_end_the_engine():
    runner = Counting()
    async with EngineProbe(engine(runner, failed_steps_max=2)) as probe:
        runner.failures = 4
        for number in range(4):  # each time beside another one
            probe.submit(make_request(f"other{number}", [1, 2]))
            (answer,) = await probe.run(make_request("bad", [1, 2, 3]))
            assert answer.error.code == "step_failed"
        runner.failures = 1
        with pytest.raises(EngineError, match="5 steps in a row failed"):
            await probe.run(make_request("b", [1, 2, 3]))


async def test_the_first_step_of_each_request_is_announced_before_it_runs():
    runner = Counting()
    told = []
    probe = EngineProbe(engine(runner, max_batch_tokens=4, max_running_requests=2))
    probe.engine.announce(lambda ids: told.append((*ids, len(runner.steps))))
    async with probe:
        for name, tokens in (("a", [1] * 6), ("b", [2] * 3), ("c", [3])):
            probe.submit(make_request(name, tokens, max_tokens=2))
        while len(told) < 3:
            await probe.step()
    assert [ids for *ids, _ in told] == [["a"], ["b"], ["c"]]
    assert [runner.steps[before] for *_, before in told] == [1, 2, 2]


async def test_the_loop_runs_while_a_step_computes_and_close_waits_for_it():
    runner = Counting()
    runner.gate = threading.Event()
    probe = EngineProbe(engine(runner))
    async with probe, asyncio.TaskGroup() as group:
        probe.submit(make_request("a", [1, 2, 3]))
        stepping = group.create_task(probe.step())
        await asyncio.sleep(0.01)
        with pytest.raises(AssertionError, match="under way"):
            probe.engine.scheduler.check_between_steps()
        closing = group.create_task(probe.engine.close())
        await asyncio.sleep(0.01)
        assert not stepping.done()
        assert not closing.done()
        runner.gate.set()
    assert stepping.done()
    assert len(runner.threads) == 1
    assert threading.get_ident() not in runner.threads


def constrained(name, structured):
    request = make_request(name, [1, 2, 3], max_tokens=2)
    return replace(request, sampling=replace(request.sampling, structured=structured))


class Compiling:
    """A `Preparer` of constrained requests that waits for `gate`; the constraint `b"bad"` cannot be compiled."""

    def __init__(self):
        self.gate = threading.Event()
        self.compiled = set()

    def is_ready(self, request):
        return request.sampling.structured in {None, *self.compiled}

    def prepare(self, request):
        assert self.gate.wait(10)
        if request.sampling.structured == b"bad":
            raise RequestError("response_format: is bad", param="response_format")
        if request.sampling.structured == b"worse":
            raise TypeError("a bug")
        self.compiled.add(request.sampling.structured)


async def test_constrained_requests_are_prepared_beside_the_batch():
    preparer = Compiling()
    preparing = BatchedEngine(
        ThreadedRunner(Counting()), SchedulerConfig(max_waiting_requests=3), preparer=preparer
    )
    async with EngineProbe(preparing) as probe:
        for name, structured in (("good", b"good"), ("bad", b"bad"), ("dropped", b"good")):
            probe.submit(constrained(name, structured))
        assert preparing.load().waiting_requests == 3
        with pytest.raises(Overloaded, match="3 requests wait for their grammar"):
            probe.submit(constrained("more", b"good"))
        with pytest.raises(RequestError, match="under way already"):
            preparing.submit(constrained("bad", b"bad"))
        probe.submit(make_request("free", [1, 2, 3], max_tokens=2))
        while probe.answers["free"].finish_reason is None:
            await probe.step()
        assert probe.answers["free"].token_ids == [1, 1]  # while the others are compiled
        probe.abort("dropped")
        preparer.gate.set()
        await probe.finish()
        bad, good = probe.answers["bad"], probe.answers["good"]
        assert bad.error.code == "invalid_request_error"
        assert bad.error.param == "response_format"
        assert good.token_ids == [1, 1]
        (again,) = await probe.run(constrained("again", b"good"))
        assert again.token_ids == [1, 1]
        (worse,) = await probe.run(constrained("worse", b"worse"))
        assert worse.error.code == "engine_error"
        assert preparing.load().waiting_requests == 0


async def test_a_grammar_that_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(batched, "TIMEOUT_S", 0.0)
    preparer = Compiling()
    async with EngineProbe(BatchedEngine(ThreadedRunner(Counting()), preparer=preparer)) as probe:
        (late,) = await probe.run(constrained("late", b"good"))
        assert "was not compiled within 0 s" in late.error.message
        assert late.error.http_status == 400
        preparer.gate.set()
        (free,) = await probe.run(make_request("free", [1, 2, 3], max_tokens=1))
        assert free.token_ids == [1]
