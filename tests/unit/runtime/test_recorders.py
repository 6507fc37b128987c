"""Windows that processes send to planners."""

import asyncio

import msgspec
import pytest

from penstock.core.types.instances import Role
from penstock.core.types.load import WorkerLoad
from penstock.runtime.observations import (
    Digest,
    DigestRecorder,
    RequestRecorder,
    RequestWindow,
    Window,
    WorkerRecorder,
    bucket_of,
)

pytestmark = pytest.mark.virtual


def digest(*values):
    recorder = DigestRecorder()
    for value in values:
        recorder.add(value)
    return recorder.take()


def test_a_digest_knows_mean_and_quantiles():
    whole = digest(*range(1, 1001))
    assert whole.count == 1000
    assert whole.mean == pytest.approx(500.5)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        assert whole.quantile(share) == pytest.approx(1000 * share, rel=0.06)
    assert Digest.merged([digest(1.0), digest(3.0)]).mean == 2.0
    assert digest().mean is None
    assert digest().quantile(0.5) is None
    assert digest(0.0).quantile(0.5) == 0.0


def test_a_part_is_taken_from_a_digest():
    assert digest(1.0, 1.0, 3.0).minus(digest(1.0)) == digest(1.0, 3.0)
    assert digest(1.0, 3.0).minus(digest(1.0, 3.0)) == digest()


def test_a_digest_is_bounded_and_begins_anew():
    recorder = DigestRecorder()
    for exponent in range(-300, 300):
        recorder.add(10.0**exponent)
    assert len(recorder.take().buckets) <= bucket_of(1e300) - bucket_of(0) + 1
    assert recorder.take() == Digest()


async def test_a_window_of_requests():
    recorder = RequestRecorder()
    recorder.arrived(100)
    recorder.arrived(300)
    recorder.first_token(0.25, waited_for_decode=False)
    recorder.first_token(0.75, waited_for_decode=True)
    await asyncio.sleep(2)
    recorder.ended(output_tokens=50, cached_tokens=64, itl_s=0.01, failed=False)
    recorder.ended(output_tokens=0, cached_tokens=0, itl_s=None, failed=True)
    window = recorder.take(queued=3, oldest_queued_s=0.5)
    assert (window.seconds, window.arrivals, window.finished, window.failed) == (2.0, 2, 1, 1)
    assert (window.input_tokens.total, window.output_tokens.total, window.cached_tokens) == (400, 50, 64)
    assert (window.ttft_s.mean, window.itl_s.mean) == (0.5, 0.01)
    assert window.decode_ttft_s == digest(0.75)
    assert (window.queued, window.oldest_queued_s) == (3, 0.5)
    await asyncio.sleep(1)
    assert recorder.take(queued=0, oldest_queued_s=0.0) == RequestWindow(seconds=1.0)
    assert msgspec.json.decode(msgspec.json.encode(window), type=Window) == window


async def test_a_window_of_a_worker_counts_steps_of_a_busy_engine_only():
    busy = WorkerLoad(
        running_requests=1, prefilled_tokens=100, generated_tokens=5, active_blocks=3, total_blocks=10
    )
    idle = WorkerLoad(prefilled_tokens=120, generated_tokens=9, total_blocks=10)
    recorder = WorkerRecorder()
    recorder.begin(Role.DECODE)
    recorder.stepped(busy)
    await asyncio.sleep(0.5)
    recorder.stepped(idle)
    await asyncio.sleep(10)
    recorder.stepped(busy)
    await asyncio.sleep(0.25)
    recorder.stepped(busy)
    window = recorder.take(busy)
    assert (window.step_s.count, window.step_s.total) == (2, 0.75), "the idle time is no step"
    assert (window.role, window.ready_s, window.seconds) == (Role.DECODE, 10.75, 10.75)
    assert (window.prefilled_tokens, window.generated_tokens) == (100, 5)
    recorder.begin(Role.PREFILL)
    await asyncio.sleep(1)
    window = recorder.take(idle)
    assert (window.role, window.ready_s, window.prefilled_tokens) == (Role.PREFILL, 1.0, 20)


@pytest.mark.parametrize(("role", "steps"), [(Role.DECODE, 0), (Role.PREFILL, 1), (Role.AGGREGATED, 1)])
async def test_a_decode_worker_whose_requests_wait_for_their_kv_is_not_busy(role, steps):
    """Prompts that wait elsewhere are computed in the next step."""
    recorder = WorkerRecorder()
    recorder.begin(role)
    recorder.stepped(WorkerLoad(waiting_requests=4))
    await asyncio.sleep(0.5)
    recorder.stepped(WorkerLoad())
    assert recorder.take(WorkerLoad()).step_s.count == steps


async def test_steps_that_are_reported_together_count_with_their_mean():
    recorder = WorkerRecorder()
    recorder.begin(Role.DECODE)
    recorder.stepped(WorkerLoad(running_requests=1, steps=7))
    await asyncio.sleep(0.5)
    recorder.stepped(WorkerLoad(running_requests=1, steps=57))
    window = recorder.take(WorkerLoad(running_requests=1, steps=57))
    assert window.step_s.count == 50
    assert window.step_s.mean == pytest.approx(0.01)
    await asyncio.sleep(0.2)
    ranks = (WorkerLoad(running_requests=1, steps=58), WorkerLoad(running_requests=1, steps=59))
    recorder.stepped(WorkerLoad.of_ranks(ranks))
    window = recorder.take(WorkerLoad())
    assert (window.step_s.count, window.step_s.mean) == (2, pytest.approx(0.1)), "not the sum of the ranks"
