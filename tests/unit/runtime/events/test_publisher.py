import numpy as np

from penstock.core.types.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventSnapshot,
    Tier,
)
from penstock.core.wire import pack_hashes, unpack_hashes
from penstock.runtime.config import EventConfig
from penstock.runtime.events.publisher import ContentMirror, EventPublisher


def stored(*hashes, parent=None, tier=Tier.DEVICE):
    return BlockStored(block_hashes=pack_hashes(hashes), parent_block_hash=parent, block_size=16, tier=tier)


def removed(*hashes, tier=Tier.DEVICE):
    return BlockRemoved(block_hashes=pack_hashes(hashes), tier=tier)


def said(publisher, after):
    return [message for message in publisher.events_after(after) if message is not None]


def replayed(messages):
    """Give what a snapshot adds up to, checking that no block comes before its parent where that is held too."""
    mirror = ContentMirror()
    events = [event for message in messages for event in message.events]
    held = {h for event in events for h in unpack_hashes(event.block_hashes).tolist()}
    seen = set()
    for event in events:
        parent = event.parent_block_hash
        for block_hash in unpack_hashes(event.block_hashes).tolist():
            assert parent not in held or parent in seen, f"{block_hash} comes before its parent {parent}"
            seen.add(block_hash)
            parent = block_hash
        mirror.apply(event)
    return mirror


def test_the_ring_is_bounded_by_hashes_too():
    publisher = EventPublisher(EventConfig(replay_hashes_max=10))
    publisher.publish([stored(*range(6))])
    publisher.publish([stored(*range(6, 12))])
    assert isinstance(said(publisher, 0)[0], EventSnapshot)
    assert len(said(publisher, 1)) == 1
    publisher.publish([AllBlocksCleared()])
    assert len(said(publisher, 1)) == 2
    publisher.publish([stored(*range(20, 40))])
    assert isinstance(said(publisher, 3)[0], EventSnapshot), "a batch larger than the ring is not kept"
    publisher.check()


def test_removing_what_is_not_held_is_counted_and_harmless():
    publisher = EventPublisher()
    publisher.publish([removed(1), stored(1), removed(1), removed(1)])
    assert publisher.mirror.counts() == {}
    assert publisher.mirror.unknown_removals == 2
    publisher.check()


def test_a_long_snapshot_is_made_a_bounded_part_at_a_time():
    publisher = EventPublisher()
    rng = np.random.default_rng(0)
    for _ in range(400):
        publisher.publish([stored(*rng.integers(0, 2**63, 100).tolist())])
    made = list(publisher.events_after(None))
    assert len(made) > 20, "most turns only look at blocks"
    assert all(len(message.events) <= 512 for message in made if message is not None)
    assert replayed(filter(None, made)).counts() == publisher.mirror.counts()


def test_those_who_read_a_snapshot_at_once_share_it_and_go_on_with_the_tail():
    publisher = EventPublisher(EventConfig(snapshot_chunk_hashes=10))
    publisher.publish([stored(*range(1, 101))])
    first = publisher.events_after(None)
    begun = next(message for message in first if message is not None)
    content = publisher.mirror.counts()
    publisher.publish([stored(200), removed(*range(1, 50))])
    second = said(publisher, None)
    assert second[0] is begun, "made once"
    assert {message.sequence for message in second} == {1}
    assert replayed(second).counts() == content, "as it was when the first reader came"
    assert [begun, *filter(None, first)] == second
    assert [message.sequence for message in publisher.events_after(1)] == [2]
    del first, begun, second
    (fresh, *_) = said(publisher, None)
    assert fresh.sequence == 2, "nobody read the other one any more"


def test_a_shared_snapshot_is_not_given_once_the_tail_after_it_is_lost():
    publisher = EventPublisher(EventConfig(replay_batches_max=2, snapshot_chunk_hashes=1))
    publisher.publish([stored(1, 2, 3)])
    reader = publisher.events_after(None)
    next(reader)
    for number in range(4, 7):
        publisher.publish([stored(number)])
    assert {message.sequence for message in said(publisher, None)} == {4}
    assert {message.sequence for message in reader if message is not None} == {1}
