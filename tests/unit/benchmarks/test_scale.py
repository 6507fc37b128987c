"""The parts of the benches of routers at scale."""

import asyncio

import numpy as np

from benchmarks.scale.cluster import Size, simulate
from benchmarks.scale.one_router import Copies, measure
from benchmarks.scale.spread import TOGETHER_S, same_worker_share
from benchmarks.scale.traffic import Recording
from penstock.core.ids import WorkerId
from penstock.core.types.events import BlockStored, EventBatch
from penstock.core.wire import pack_hashes, unpack_hashes
from penstock.runtime.requests.frames import CODEC, Event
from penstock.testing.planes.scripted_worker import scripted_instance

_LENGTH_BYTES = 4
_OWN, _PARENT = 0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4321
_SIZE = Size(workers=6, routers=3, per_worker_s=8.0, ramp_s=1.0, window_s=0.5)


def test_requests_of_other_routers_at_once_share_a_worker() -> None:
    late_s = 2 * TOGETHER_S
    assert same_worker_share([]) == 0
    assert same_worker_share([(0.0, 0, 7), (0.0, 1, 7)]) == 0.5
    assert same_worker_share([(0.0, 0, 7), (0.0, 0, 7)]) == 0, "one router knows what it has sent"
    assert same_worker_share([(0.0, 0, 7), (0.0, 1, 8)]) == 0
    assert same_worker_share([(0.0, 0, 7), (late_s, 1, 7)]) == 0


def test_copies_have_blocks_of_their_own_but_for_common_beginnings() -> None:
    stored = BlockStored(block_hashes=pack_hashes([5, _OWN]), parent_block_hash=_PARENT, block_size=16)
    frame = CODEC.encode(Event(message=EventBatch(sequence=1, events=(stored,))))
    instance = scripted_instance("a", worker_id=1)
    recording = Recording(
        [instance], {WorkerId(1): []}, [(WorkerId(1), frame)], shared=np.array([5], np.uint64)
    )
    copies = Copies(recording, 3)
    assert len({each.worker_id for each in copies.instances()}) == 3
    frames = copies.frames()
    assert len({worker_id for worker_id, _ in frames}) == 3
    hashes = []
    for _, each in frames:
        message = CODEC.decode(each[_LENGTH_BYTES:])
        assert isinstance(message, Event)
        assert isinstance(message.message, EventBatch)
        (event,) = message.message.events
        assert isinstance(event, BlockStored)
        assert event.parent_block_hash is not None
        hashes.append((*unpack_hashes(event.block_hashes).tolist(), event.parent_block_hash))
    assert [first for first, _, _ in hashes] == [5, 5, 5]
    assert hashes[0] == (5, _OWN, _PARENT), "the first is as recorded"
    assert len({second for _, second, _ in hashes}) == len({parent for _, _, parent in hashes}) == 3
    assert len({second ^ parent for _, second, parent in hashes}) == 1, "renamed alike"


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
