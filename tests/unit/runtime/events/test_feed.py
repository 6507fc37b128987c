import asyncio

import pytest

from penstock.core.types.events import BlockStored, EventBatch
from penstock.core.wire import pack_hashes
from penstock.runtime.config import EventConfig
from penstock.runtime.events.publisher import EventPublisher
from penstock.runtime.events.subscriber import EventFeed


class Outlet:
    """A connection with room for `room` messages."""

    def __init__(self, room, config=None, **options):
        self.room = room
        self.sent = []
        self.publisher = EventPublisher(config)
        self.feed = EventFeed(self.publisher, self, **options)

    @property
    def writable(self):
        return self.room > 0

    def send_event(self, message):
        self.room -= 1
        self.sent.append(message)

    def publish(self, *hashes):
        for block_hash in hashes:
            event = BlockStored(block_hashes=pack_hashes([block_hash]), parent_block_hash=None, block_size=16)
            self.publisher.publish([event])

    def make_room(self, room):
        self.room = room
        self.feed.pump()

    @property
    def sequences(self):
        return [message.sequence for message in self.sent]


def test_what_a_full_connection_missed_is_read_again_from_the_ring():
    outlet = Outlet(3)
    outlet.publish(1)
    outlet.feed.subscribe(0)
    outlet.publish(*range(2, 10))
    assert outlet.sequences == [1, 2, 3]
    outlet.make_room(3)
    assert outlet.sequences == list(range(1, 7))
    outlet.publish(10)
    outlet.make_room(100)
    outlet.publish(11)
    assert outlet.sequences == list(range(1, 12))


@pytest.mark.virtual
async def test_where_the_ring_is_too_short_a_snapshot_takes_its_place_a_message_a_turn():
    outlet = Outlet(1, EventConfig(replay_batches_max=2, snapshot_chunk_hashes=4))
    outlet.feed.subscribe(0)
    outlet.publish(*range(1, 11))
    outlet.make_room(1)
    outlet.publish(11)
    outlet.make_room(100)
    sent = len(outlet.sent)
    while outlet.sequences[-1] < 11:
        await asyncio.sleep(0)
        assert len(outlet.sent) <= sent + 2, "a part of the snapshot, or its last and the tail"
        sent = len(outlet.sent)
    snapshot = [m for m in outlet.sent if not isinstance(m, EventBatch)]
    assert [(m.chunk, m.sequence) for m in snapshot] == [(0, 10), (1, 10), (2, 10)]
    assert outlet.sequences == [1, 10, 10, 10, 11]


def test_asking_again_starts_over_and_subscribes_once():
    outlet = Outlet(0)
    outlet.publish(1, 2, 3)
    outlet.feed.subscribe(0)
    outlet.feed.subscribe(1)
    outlet.make_room(100)
    outlet.publish(4)
    assert outlet.sequences == [2, 3, 4]


def test_once_closed_nothing_is_sent():
    outlet = Outlet(1)
    outlet.feed.close()
    outlet.feed.subscribe(0)
    outlet.publish(1, 2)
    outlet.feed.close()
    outlet.feed.close()
    outlet.make_room(100)
    outlet.publish(3)
    assert outlet.sequences == [1]


def test_where_a_carrier_brings_new_events_only_what_is_asked_for_is_sent_and_positions():
    outlet = Outlet(100, is_live=False)
    outlet.publish(1, 2)
    outlet.feed.subscribe(0)
    outlet.publish(3, 4)
    outlet.feed.tell_position()
    assert outlet.sequences == [1, 2], "what is new may be on its way"
    outlet.publish(5)
    for _ in range(3):
        outlet.feed.tell_position()
    assert [type(message).__name__ for message in outlet.sent[2:]] == ["EventPosition"] * 2
    assert outlet.sequences[2:] == [4, 5], "each once"
    outlet.feed.subscribe(2)
    assert outlet.sequences[4:] == [3, 4, 5]
    outlet.feed.close()
