"""The parts of the benches of routers at scale."""

import asyncio

from benchmarks.scale.cluster import Size, simulate
from benchmarks.scale.one_router import measure
from benchmarks.scale.spread import TOGETHER_S, same_worker_share

_SIZE = Size(workers=6, routers=3, per_worker_s=8.0, ramp_s=1.0, window_s=0.5)


def test_requests_of_other_routers_at_once_share_a_worker() -> None:
    late_s = 2 * TOGETHER_S
    assert same_worker_share([]) == 0
    assert same_worker_share([(0.0, 0, 7), (0.0, 1, 7)]) == 0.5
    assert same_worker_share([(0.0, 0, 7), (0.0, 0, 7)]) == 0, "one router knows what it has sent"
    assert same_worker_share([(0.0, 0, 7), (0.0, 1, 8)]) == 0
    assert same_worker_share([(0.0, 0, 7), (late_s, 1, 7)]) == 0


def test_several_routers_are_metered_and_one_is_restarted() -> None:
    outcome = simulate(_SIZE, seed=1, with_restart=True)
    assert len(outcome.meters) == _SIZE.routers
    assert all(meter.load_reports and meter.event_messages for meter in outcome.meters)
    assert outcome.decisions == sum(len(meter.sent) for meter in outcome.meters) > 0
    assert min(outcome.unevenness) >= 1
    assert outcome.in_flight[-1] > _SIZE.workers * _SIZE.per_worker_s * _SIZE.ramp_s / 2
    restart = outcome.restart
    assert restart is not None
    assert 0 < restart.ready_s <= restart.whole_s <= restart.alike_s


def test_a_router_alone_holds_what_the_recorded_workers_hold() -> None:
    recording = simulate(_SIZE, seed=1).recording
    alone = asyncio.run(measure(recording, 2 * _SIZE.workers))
    again = asyncio.run(measure(recording, _SIZE.workers))
    assert alone.pairs == 2 * again.pairs > 0
    assert alone.decision_us > 0
    assert alone.input_cores > 0
