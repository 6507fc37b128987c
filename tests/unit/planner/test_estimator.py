"""The demand that is expected, from observations."""

from dataclasses import replace

import pytest

from penstock.core.types.instances import Role
from penstock.perf.model_shape import Parallel
from penstock.planner.capacity import Capacity, WorkerModel
from penstock.planner.demand import SloTargets
from penstock.planner.estimator import Estimator, StepFactor
from penstock.planner.forecast import Series
from penstock.planner.observation import Observation, ObservedDemand, ObservedWorker
from penstock.runtime.observations import Digest, bucket_of

SLO = SloTargets(ttft_s=1.0, itl_s=0.1, percentile=90.0)
STRICT = SloTargets(ttft_s=1.0, itl_s=0.1, percentile=99.0)
D = Role.DECODE


class Steps:
    """10 ms a step, 1 ms a sequence, 0.1 ms a prompt token."""

    kv_capacity_tokens = 1000

    def kv_held_tokens(self, tokens):
        return tokens

    def decode_step_s(self, batch, context_tokens):
        return 0.01 + 0.001 * batch

    def mixed_step_s(self, chunks, batch, context_tokens):
        return self.decode_step_s(batch, context_tokens) + 1e-4 * sum(new for new, _ in chunks)


MODEL = WorkerModel(Steps(), Parallel())
CAPACITY = Capacity(role=D, model=MODEL, max_batch_tokens=512)
IDLE = ObservedWorker("d", D, 100.0, Digest(), 0.0, 0.0, 0, 0, 0, 0, 0.0, 0.0)


def digest(value, count):
    return Digest(count=count, total=value * count, buckets={bucket_of(value): count})


def seen(rate, inputs=100, outputs=50, **more):
    count = max(1, round(10 * rate))
    demand = ObservedDemand(
        arrivals_per_s=rate, input_tokens=digest(inputs, count), output_tokens=digest(outputs, count), **more
    )
    return Observation(at_s=0.0, seconds=10.0, demand=demand, frontends=("f",))


def estimator(slo=SLO):
    return Estimator([CAPACITY], slo, interval_s=10.0, horizon_s=120.0)


def test_the_first_intervals_are_taken_with_a_reserve():
    new = estimator()
    new.take(seen(4.0))
    expected = new.expect(seen(4.0), warm={Role.AGGREGATED: 1})
    assert expected.rate_per_s == pytest.approx(6.0)
    assert (expected.input_tokens, expected.output_tokens) == (100, 50)


def test_lengths_follow_and_keep_their_distribution():
    new = estimator()
    for step in range(60):
        new.take(seen(4.0, inputs=100 + 10 * step))
    expected = new.expect(seen(4.0), warm={Role.AGGREGATED: 1})
    assert expected.input_tokens == pytest.approx(100 + 10 * 44.5, rel=0.01), "the mean of what was seen"
    assert expected.input_lengths.count == 30 * 40
    assert expected.input_lengths.spread > 1.01
    assert expected.output_lengths.spread == pytest.approx(1.0, abs=0.1)


def test_the_first_answers_that_end_are_the_shortest():
    new = estimator(STRICT)
    few = seen(4.0, inputs=2000, outputs=10)
    new.take(few)
    first = new.expect(few, warm={})
    assert first.is_scant(STRICT), "40 of 100"
    assert first.output_tokens == pytest.approx((40 * 10 + 60 * 256) / 100, rel=0.01)
    for _ in range(3):
        new.take(few)
    later = new.expect(few, warm={})
    assert not later.is_scant(STRICT)
    assert (later.input_tokens, later.output_tokens) == (2000, 10)


def test_a_surge_of_work_is_one_without_more_requests():
    new = estimator()
    for _ in range(60):
        new.take(seen(8.0))
    expected = new.expect(seen(8.0), warm={D: 1})
    assert new.surges(seen(8.0), expected) == {}
    assert new.surges(seen(8.0, outputs=60), expected) == {}, "within the band"
    longer = new.surges(seen(8.0, outputs=200), expected)
    assert longer[D] > 2 * expected.rate_of(D)
    more = new.surges(seen(24.0), expected)
    load = new.forecasts["decode_load"]
    assert more[D] == pytest.approx(24.0 * load.high / load.mean, rel=0.01), "with the band of the forecast"


def test_a_longer_horizon_is_learned_from_what_was_seen():
    series = Series("requests_per_s", interval_s=10.0, horizon_s=50.0, season_s=None)
    for step in range(100):
        series.take(float(step))
    near = series.forecast().mean
    series.look_ahead(300.0)
    assert not series.forecast().is_cold
    assert series.forecast().mean > near


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_step_times_are_corrected_by_measured_ones(factor):
    found = StepFactor(MODEL)
    decoding = replace(IDLE, step_s=digest(factor * 0.03, 100), running_requests=20)
    # 100 steps in 10 s with 30 prompt tokens each: 10 + 20 + 3 ms.
    mixed = replace(decoding, step_s=digest(factor * 0.033, 100), prefilled_tokens_per_s=300.0)
    for _ in range(20):
        found.learn([decoding, mixed, IDLE], 10.0)
    assert found.value == pytest.approx(factor, rel=0.06)
    assert found.is_trusted


def test_work_counts_where_requests_get_fewer_as_they_get_longer():
    """Twice the tokens at half the rate: the requests to provide for are those of the new length, at no smaller work."""
    new = estimator()
    for _ in range(40):
        new.take(seen(8.0, outputs=50))
    before = new.expect(seen(8.0), warm={D: 1})
    for _ in range(400):
        new.take(seen(4.0, outputs=100))
    after = new.expect(seen(4.0), warm={D: 1})
    assert after.output_tokens == pytest.approx(100, rel=0.05)
    works = [each.rate_of(D) / CAPACITY.rate_per_s(1, each, SLO) for each in (before, after)]
    assert works[1] == pytest.approx(works[0], rel=0.25)
    assert after.rate_of(D) < 0.7 * before.rate_of(D)


def test_latencies_of_warm_workers_correct_the_prediction():
    slo = SloTargets(ttft_s=1.0, itl_s=0.03, percentile=90.0)
    capacity, warm = replace(CAPACITY, role=Role.AGGREGATED), {Role.AGGREGATED: 2}
    found = Estimator([capacity], slo, interval_s=10.0, horizon_s=120.0)
    now = found.expect(seen(8.0), warm=warm)
    slow = seen(8.0, itl_s=digest(1.5 * capacity.predict(2, 8.0, now, slo).itl_s, 80))
    assert now.itl_factor == 1.15, "a guess"
    for _ in range(150):
        found.take(slow, warm=warm)
    assert found.expect(slow, warm=warm).itl_factor == pytest.approx(1.5, rel=0.1)
