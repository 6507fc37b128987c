"""Publisher and subscriber over a network that loses, repeats and reorders: they always come together again."""

import asyncio
import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, EventPosition, Tier
from penstock.core.wire import pack_hashes
from penstock.runtime.config import EventConfig
from penstock.runtime.events.publisher import ContentMirror, EventPublisher
from penstock.runtime.events.subscriber import EventSubscriber
from penstock.sim.loop import SimLoop

TIERS = st.sampled_from([Tier.DEVICE, Tier.HOST])
HASHES = st.integers(1, 8)


class EventPlaneMachine(RuleBasedStateMachine):
    """Messages are in flight until delivered; `contents` is what the worker held at each sequence."""

    @initialize(
        batches=st.integers(0, 6), hashes=st.integers(1, 12), chunk=st.integers(1, 5), seed=st.integers(0, 99)
    )
    def begin(self, batches, hashes, chunk, seed):
        config = EventConfig(
            replay_batches_max=batches, replay_hashes_max=hashes, snapshot_chunk_hashes=chunk
        )
        self.worker_id = 1
        self.loop = SimLoop()
        self.publisher = EventPublisher(config)
        self.mirror = ContentMirror()
        self.contents = {0: {}}
        self.flight = []
        self.asked = []
        self.parents = {}
        self.publisher.subscribe(self)
        self.subscriber = EventSubscriber(
            self,
            apply=self.apply,
            replace=self.replace,
            on_fault=lambda _: None,
            rng=random.Random(seed),
            config=config,
        )
        self.do(self.subscriber.start)

    def do(self, call, *args):
        """Call on the event loop; every timer that is due by then has fired."""

        async def main():
            call(*args)

        self.loop.run_until_complete(main())

    def push_event(self, message):
        self.flight.append(message)

    def subscribe(self, after_sequence, _holder):
        self.asked.append(after_sequence)

    def apply(self, _worker_id, events):
        for event in events:
            self.mirror.apply(event)

    def replace(self, worker_id, part):
        if part.chunk == 0:
            self.mirror = ContentMirror()
        self.apply(worker_id, part.events)

    def publish(self, event):
        self.publisher.publish([event])
        self.contents[self.publisher.sequence] = self.publisher.mirror.counts()

    @rule(hashes=st.lists(HASHES, min_size=1, max_size=4, unique=True), tier=TIERS, data=st.data())
    def store(self, hashes, tier, data):
        """Store a chain; a hash has the same parent for ever, as it names its whole prefix."""
        first = hashes[0]
        parent = self.parents.setdefault(
            first, data.draw(st.none() | st.integers(1, first)) if first > 1 else None
        )
        parent = None if parent == first else parent
        self.parents[first] = parent
        chain = [first]
        for block_hash in sorted(h for h in hashes if h > first):
            if self.parents.setdefault(block_hash, chain[-1]) != chain[-1]:
                break
            chain.append(block_hash)
        self.publish(
            BlockStored(block_hashes=pack_hashes(chain), parent_block_hash=parent, block_size=16, tier=tier)
        )

    @rule(hashes=st.lists(HASHES, min_size=1, max_size=3), tier=TIERS)
    def remove(self, hashes, tier):
        self.publish(BlockRemoved(block_hashes=pack_hashes(hashes), tier=tier))

    @rule()
    def clear(self):
        self.publish(AllBlocksCleared())

    @rule()
    def doubt(self):
        self.do(self.subscriber.doubt)

    @precondition(lambda self: self.flight)
    @rule(count=st.integers(1, 5))
    def deliver(self, count):
        for _ in range(min(count, len(self.flight))):
            self.do(self.subscriber.push, self.flight.pop(0))

    @precondition(lambda self: self.flight)
    @rule(data=st.data())
    def lose(self, data):
        del self.flight[data.draw(st.integers(0, len(self.flight) - 1))]

    @precondition(lambda self: self.flight)
    @rule(data=st.data())
    def repeat(self, data):
        index = data.draw(st.integers(0, len(self.flight) - 1))
        self.flight.insert(data.draw(st.integers(0, len(self.flight))), self.flight[index])

    @precondition(lambda self: len(self.flight) > 1)
    @rule(data=st.data())
    def reorder(self, data):
        message = self.flight.pop(data.draw(st.integers(0, len(self.flight) - 1)))
        self.flight.insert(data.draw(st.integers(0, len(self.flight))), message)

    @precondition(lambda self: self.asked)
    @rule()
    def answer(self):
        self.flight += filter(None, self.publisher.events_after(self.asked.pop(0)))

    @precondition(lambda self: self.asked)
    @rule()
    def lose_the_question(self):
        self.asked.pop(0)

    @rule(seconds=st.floats(0.01, 40))
    def wait(self, seconds):
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @rule()
    def tell_position(self):
        self.flight.append(EventPosition(sequence=self.publisher.sequence))

    @rule(by_position=st.booleans())
    def heal(self, *, by_position=False):
        """Lose nothing for a while: one more batch, or the position of the latest, and the two are alike."""
        self.parents.setdefault(1, None)
        if by_position:
            self.tell_position()
        else:
            self.publish(BlockStored(block_hashes=pack_hashes([1]), parent_block_hash=None, block_size=16))
        for _ in range(10):
            while self.flight or self.asked:
                while self.flight:
                    self.do(self.subscriber.push, self.flight.pop(0))
                while self.asked:
                    self.flight += filter(None, self.publisher.events_after(self.asked.pop(0)))
            if self.subscriber.synced:
                break
            self.wait(31)
        assert self.subscriber.sequence == self.publisher.sequence
        assert self.mirror.counts() == self.publisher.mirror.counts()

    @invariant()
    def what_is_applied_was_true_once(self):
        if hasattr(self, "subscriber"):
            self.publisher.check()
            self.mirror.check()
            if self.subscriber.sequence is not None:
                assert self.mirror.counts() == self.contents[self.subscriber.sequence]

    def teardown(self):
        if hasattr(self, "subscriber"):
            self.heal()
            self.loop.close()


TestEventPlane = EventPlaneMachine.TestCase
TestEventPlane.settings = settings(stateful_step_count=40)
