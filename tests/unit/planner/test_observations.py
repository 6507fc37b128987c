"""Windows add up to what a planner sees."""

import asyncio

import pytest

from penstock.core.types.instances import Role
from penstock.planner.observation import ObservationStream
from penstock.runtime.observations import Digest, RequestWindow, WorkerWindow, bucket_of


def tokens(count, each):
    return Digest(count=count, total=count * each, buckets={bucket_of(each): count})


def requests(arrivals, **fields):
    return RequestWindow(seconds=1.0, arrivals=arrivals, input_tokens=tokens(arrivals, 100), **fields)


def worker(role=Role.DECODE, **fields):
    return WorkerWindow(seconds=1.0, role=role, total_blocks=10, **fields)


@pytest.mark.virtual
async def test_frontends_add_up():
    stream = ObservationStream()
    for _ in range(4):
        await asyncio.sleep(1)
        stream.put("frontend-1", requests(3, finished=2, cached_tokens=120, queued=1, oldest_queued_s=2.0))
        stream.put("frontend-2", requests(1, failed=1, queued=4, oldest_queued_s=0.5))
    seen = stream.observe(10.0)
    demand = seen.demand
    assert (demand.arrivals_per_s, demand.finished_per_s, demand.failed_per_s) == (4.0, 2.0, 1.0)
    assert (demand.input_tokens.count, demand.input_tokens.mean) == (16, 100.0)
    assert demand.cached_share == pytest.approx(0.3)
    assert (demand.queued, demand.oldest_queued_s) == (5, 2.0)
    assert seen.frontends == ("frontend-1", "frontend-2")
    assert stream.observe(1.5).demand.input_tokens.count == 8


@pytest.mark.virtual
async def test_workers_are_seen_in_their_present_role():
    stream = ObservationStream()
    stream.put("decode-1", worker(Role.PREFILL, prefilled_tokens=500))
    stream.put("decode-1", worker(generated_tokens=10, active_blocks=4, running_requests=2))
    stream.put("decode-1", worker(generated_tokens=30, active_blocks=5, running_requests=3))
    seen = stream.observe(10.0)
    (view,) = seen.of(Role.DECODE)
    assert (view.generated_tokens_per_s, view.prefilled_tokens_per_s) == (20.0, 0.0)
    assert (view.kv_usage, view.running_requests) == (0.5, 3)
    assert seen.of(Role.PREFILL) == ()


@pytest.mark.virtual
async def test_silent_sources_leave_the_observation():
    stream = ObservationStream(kept_s=60, silent_after_s=5)
    stream.put("decode-1", worker())
    stream.put("frontend-1", requests(8, queued=7))
    for _ in range(6):
        await asyncio.sleep(1)
        stream.put("decode-2", worker())
        stream.put("frontend-2", requests(1))
    seen = stream.observe(10.0)
    assert [view.name for view in seen.workers] == ["decode-2"]
    assert (seen.frontends, seen.silent) == (("frontend-2",), ("decode-1", "frontend-1"))
    assert seen.demand.queued == 0, "what waits there is not known any more"
    assert seen.demand.input_tokens.count == 14, "what arrived there did arrive"
    await asyncio.sleep(61)
    stream.put("decode-2", worker())
    assert stream.observe(10.0).silent == ("decode-1", "frontend-1", "frontend-2"), "they have not ended"
    for name in ("decode-1", "frontend-1", "frontend-2"):
        stream.forget(name)
    assert stream.observe(10.0).silent == ()
    stream.forget("decode-2")
    assert stream.observe(10.0).workers == ()


@pytest.mark.virtual
async def test_a_process_that_is_ready_and_never_heard_is_silent():
    stream = ObservationStream(silent_after_s=5)
    stream.put("decode-1", worker())
    for name in ("decode-1", "decode-2", "decode-3"):
        stream.expect(name)
    await asyncio.sleep(4)
    stream.put("decode-1", worker())
    stream.put("decode-2", worker())
    assert stream.observe(10.0).silent == ()
    await asyncio.sleep(2)
    assert stream.observe(10.0).silent == ("decode-3",)
    stream.put("decode-3", worker())
    assert stream.observe(10.0).silent == ()
    stream.expect("decode-4")
    stream.forget("decode-4")
    await asyncio.sleep(6)
    assert stream.observe(10.0).silent == ("decode-1", "decode-2", "decode-3")


@pytest.mark.virtual
async def test_a_source_keeps_a_bounded_number_of_windows():
    stream = ObservationStream(windows_max=3)
    for _ in range(10):
        stream.put("frontend-1", requests(1))
    assert stream.observe(100.0).demand.input_tokens.count == 3
