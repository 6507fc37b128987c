import asyncio

from penstock.core.types.events import BlockStored, EventBatch
from penstock.core.wire import pack_hashes
from penstock.runtime.config import EventConfig
from penstock.runtime.events.feed import EventFeed
from penstock.runtime.events.publisher import EventPublisher
from penstock.sim.loop.loop import run_virtual


class Outlet:
    """A connection with room for `room` messages."""

    def __init__(self, room):
        self.room = room
        self.sent = []

    @property
    def writable(self):
        return self.room > 0

    def send_event(self, message):
        self.room -= 1
        self.sent.append(message)


def publish(publisher, *hashes):
    for block_hash in hashes:
        event = BlockStored(block_hashes=pack_hashes([block_hash]), parent_block_hash=None, block_size=16)
        publisher.publish([event])


def sequences(outlet):
    return [message.sequence for message in outlet.sent]


def test_a_connection_with_room_gets_everything_at_once():
    publisher, outlet = EventPublisher(), Outlet(100)
    feed = EventFeed(publisher, outlet)
    publish(publisher, 1, 2)
    feed.subscribe(0)
    publish(publisher, 3)
    assert sequences(outlet) == [1, 2, 3]


def test_what_a_full_connection_missed_is_read_again_from_the_ring():
    publisher, outlet = EventPublisher(), Outlet(1)
    feed = EventFeed(publisher, outlet)
    feed.subscribe(0)
    publish(publisher, *range(1, 10))
    assert sequences(outlet) == [1]
    assert not feed._pending, "nothing is kept for it"
    outlet.room = 3
    feed.pump()
    assert sequences(outlet) == [1, 2, 3, 4]
    publish(publisher, 10)
    outlet.room = 100
    feed.pump()
    assert sequences(outlet) == list(range(1, 11))
    publish(publisher, 11)
    assert sequences(outlet)[-1] == 11


def test_where_the_ring_is_too_short_a_snapshot_takes_its_place_a_message_a_turn():
    async def main():
        await too_short_a_ring()

    run_virtual(main())


async def too_short_a_ring():
    publisher, outlet = EventPublisher(EventConfig(replay_batches_max=2, snapshot_chunk_hashes=4)), Outlet(1)
    feed = EventFeed(publisher, outlet)
    feed.subscribe(0)
    publish(publisher, *range(1, 11))
    outlet.room = 1
    feed.pump()
    publish(publisher, 11)
    outlet.room = 100
    feed.pump()
    sent = len(outlet.sent)
    while outlet.sent[-1].sequence < 11:
        await asyncio.sleep(0)
        assert len(outlet.sent) <= sent + 2, "a part of the snapshot, or its last and the tail"
        sent = len(outlet.sent)
    snapshot = [m for m in outlet.sent if not isinstance(m, EventBatch)]
    assert [(m.chunk, m.sequence) for m in snapshot] == [(0, 10), (1, 10), (2, 10)]
    assert sequences(outlet) == [1, 10, 10, 10, 11]


def test_asking_again_starts_over_and_subscribes_once():
    publisher, outlet = EventPublisher(), Outlet(0)
    feed = EventFeed(publisher, outlet)
    publish(publisher, 1, 2, 3)
    feed.subscribe(0)
    feed.subscribe(1)
    outlet.room = 100
    feed.pump()
    publish(publisher, 4)
    assert sequences(outlet) == [2, 3, 4]


def test_once_closed_nothing_is_sent():
    publisher, outlet = EventPublisher(), Outlet(1)
    feed = EventFeed(publisher, outlet)
    feed.close()
    feed.subscribe(0)
    publish(publisher, 1, 2)
    feed.close()
    feed.close()
    outlet.room = 100
    feed.pump()
    publish(publisher, 3)
    assert sequences(outlet) == [1]


def test_where_a_carrier_brings_new_events_only_what_is_asked_for_is_sent_and_positions():
    publisher, outlet = EventPublisher(), Outlet(100)
    feed = EventFeed(publisher, outlet, is_live=False)
    publish(publisher, 1, 2)
    feed.subscribe(0)
    publish(publisher, 3, 4)
    assert sequences(outlet) == [1, 2]
    feed.tell_position()
    assert sequences(outlet) == [1, 2], "what is new may be on its way"
    publish(publisher, 5)
    feed.tell_position()
    feed.tell_position()
    feed.tell_position()
    assert [type(message).__name__ for message in outlet.sent[2:]] == ["EventPosition"] * 2
    assert sequences(outlet)[2:] == [4, 5], "each once"
    feed.subscribe(2)
    assert sequences(outlet)[4:] == [3, 4, 5]
    feed.close()
