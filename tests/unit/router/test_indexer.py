"""What workers say of their blocks, kept: and what cannot be true left out, counted and asked for anew."""

import asyncio

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventSnapshot
from penstock.core.wire import PackedHashes, pack_hashes
from penstock.router.config import RouterConfig
from penstock.router.indexer import Indexer
from penstock.router.metrics import RouterMetrics
from tests.support.scene import HASHES, scenario, stored, view

SIZE = 4
CUT = PackedHashes(pack_hashes(HASHES)[:-3])
BAD = [
    (BlockStored(block_hashes=pack_hashes(HASHES), parent_block_hash=None, block_size=8), "block_size"),
    (BlockStored(block_hashes=CUT, parent_block_hash=None, block_size=SIZE), "malformed"),
    (BlockStored(block_hashes=pack_hashes(HASHES), parent_block_hash=-1, block_size=SIZE), "malformed"),
    (BlockRemoved(block_hashes=CUT), "malformed"),
]


@pytest.mark.parametrize(("event", "fault"), BAD)
@pytest.mark.virtual
async def test_what_cannot_be_is_left_out_and_counted_and_the_rest_applied(event, fault):
    registry = CollectorRegistry()
    indexer = Indexer(RouterConfig(), RouterMetrics(registry))
    assert indexer.apply(0, [stored(HASHES[:2]), event], SIZE) == 1
    assert indexer.tree.match(HASHES).depths.tolist() == [2]
    assert indexer.apply(0, [AllBlocksCleared()], SIZE) == 0
    if isinstance(event, BlockStored):
        events = (stored(HASHES[:3]), event)
        indexer.replace(0, EventSnapshot(sequence=2, chunk=0, last=True, events=events), SIZE)
        assert indexer.tree.match(HASHES).depths.tolist() == [3]
    indexer.check()
    count = registry.get_sample_value("penstock_router_event_faults_total", {"fault": fault})
    assert count == 1 + isinstance(event, BlockStored)


@scenario(num_workers=1)
async def test_after_foreign_events_a_worker_is_asked_for_its_content_and_the_index_is_right_again(
    cluster, dispatcher, engines
):
    """What is left out of a batch may be what took back something that is told of as held."""

    engines["w1"].step(events=[stored(HASHES)])
    await asyncio.sleep(0.01)
    fleet = dispatcher._shared.fleet
    (member,) = fleet.slots.now()[:1]
    assert member is not None
    other = BlockStored(
        block_hashes=pack_hashes(np.arange(3, dtype=np.uint64)), parent_block_hash=None, block_size=16
    )
    with capture_logs() as logs:
        for number in (2, 3):  # in place of what the worker says: as if its bytes had been another's
            member.subscriber.push(
                EventBatch(sequence=number, events=(BlockRemoved(block_hashes=CUT), other))
            )
        engines["w1"].step(events=[BlockRemoved(block_hashes=pack_hashes(HASHES[3:]))])
        engines["w1"].step(events=[stored(HASHES[:1])])
        await asyncio.sleep(1)
    shown = view(dispatcher, "w1")
    assert (shown.condition, shown.connections, shown.indexed_blocks) == ("ready", 1, 3)
    assert fleet.tree.match(HASHES).depths.tolist() == [3]
    assert shown.event_resyncs == 1
    warnings = [log for log in logs if log["log_level"] == "warning"]
    assert [(log["event"], log["worker"], log["events"]) for log in warnings] == [
        ("kv_events_left_out", "w1", 2)
    ]


@pytest.mark.parametrize(
    ("config", "blocks", "fix"),
    [
        (RouterConfig(indexed_blocks_max=1000), 10_000_000, "raise router.indexed_blocks_max, 1000 now"),
        (RouterConfig(), 600_000, "more than 2 times the 600000 blocks that they say they have"),
    ],
)
@pytest.mark.virtual
async def test_a_full_index_says_what_to_do(config, blocks, fix):
    indexer = Indexer(config, RouterMetrics(CollectorRegistry()))
    indexer.expect(3, blocks)
    room = min(config.indexed_blocks_max, 2 * blocks)
    hashes = np.arange(1, room + 101, dtype=np.uint64)
    with capture_logs() as logs:
        indexer.apply(0, [stored(hashes)], SIZE)
        await asyncio.sleep(2)
    assert indexer.tree.held_blocks(0) == room
    (warning,) = logs
    assert (warning["event"], warning["evicted"]) == ("index_full", 100)
    assert fix in warning["fix"]
