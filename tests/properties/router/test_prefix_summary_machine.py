"""Summaries of prefixes against exact sets: no more is claimed than was told and held, all comes in the end, within the bytes."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.core.errors import ProtocolError
from penstock.core.types.events import EventSnapshot
from penstock.core.types.kv import PrefixSummary, blocks_per_chunk, chunk_hashes
from penstock.core.wire import unpack_hashes
from penstock.engine.openai.prefixes import EXPIRES_S, AdvertisedPrefixes
from penstock.router.config import PrefixSummaryConfig
from penstock.router.indexer import RegionIndex
from penstock.router.radix import PrefixMatch, RadixTree
from penstock.router.summaries import HotPrefixes
from penstock.runtime.config import EventConfig
from penstock.runtime.events.publisher import EventPublisher

BLOCK, SLOTS, LINK = 64, 3, 1
ROOT = bytes(range(16))
BLOCKS = blocks_per_chunk(BLOCK)
CHUNKS = 6
READY = np.array([True, True, False])
slots = st.integers(0, SLOTS - 1)
prompts = st.tuples(st.integers(0, 5), st.integers(1, CHUNKS))


def path_of(prompt: tuple[int, int]) -> np.ndarray:
    """Name the blocks of a prompt; families share their first two chunks by pairs."""
    family, chunks = prompt
    shared = 10_000 * (family // 2 + 1)
    own = shared + 1000 * (family % 2 + 1)
    blocks = [(shared if index < 2 * BLOCKS else own) + index for index in range(chunks * BLOCKS)]
    return np.array(blocks, dtype=np.uint64)


class Summaries(RuleBasedStateMachine):
    """Two routers of a region tell, one link takes in, and one router there follows the link's KV events."""

    @initialize(bytes_per_s=st.sampled_from((64, 400, 64_000)))
    def begin(self, bytes_per_s: int) -> None:
        self.now_s = 0.0
        self.config = PrefixSummaryConfig(bytes_per_s=bytes_per_s, chunks_max=1024)
        self.tree = RadixTree(None, SLOTS)
        self.hot = {origin: HotPrefixes(self.tree, BLOCK, self.config, 0.0) for origin in (1, 2)}
        self.told = AdvertisedPrefixes(ROOT, BLOCK)
        self.ever: set[int] = set()
        self.index, self.publisher = RegionIndex(), EventPublisher(EventConfig())
        self.sent_bytes = 0
        self.held: list[set[int]] = [set() for _ in range(SLOTS)]
        self.asked_s = {1: 0.0, 2: 0.0}

    # -- the region that tells

    @rule(slot=slots, prompt=prompts)
    def computed(self, slot: int, prompt: tuple[int, int]) -> None:
        path = path_of(prompt)
        new = [int(block) for block in path if int(block) not in self.held[slot]]
        if new:
            start = len(path) - len(new)
            self.tree.store(slot, path[start:], int(path[start - 1]) if start else None)
            self.held[slot].update(new)

    @rule(origin=st.sampled_from((1, 2)), prompt=prompts)
    def routed(self, origin: int, prompt: tuple[int, int]) -> None:
        self.hot[origin].note(path_of(prompt))

    @rule(slot=slots)
    def evicted(self, slot: int) -> None:
        self.tree.clear(slot)
        self.held[slot].clear()

    # -- the link

    @rule(origin=st.sampled_from((1, 2)))
    def asks(self, origin: int) -> None:
        interval_s = min(self.now_s - self.asked_s[origin], 1.0)
        self.asked_s[origin] = self.now_s
        bytes_max = int(self.config.bytes_per_s * interval_s)
        changes = self.hot[origin].changes(self.told.after.get(origin, 0), bytes_max, READY, self.now_s)
        self.sent_bytes += len(changes.added) + len(changes.removed)
        self.ever.update(unpack_hashes(changes.added).tolist())
        self.take(
            PrefixSummary(
                origin=origin,
                root=ROOT,
                chunk_tokens=BLOCKS * BLOCK,
                since=changes.since,
                version=changes.version,
                added=changes.added,
                removed=changes.removed,
            )
        )

    @rule(origin=st.sampled_from((1, 2)))
    def restarts(self, origin: int) -> None:
        """A router there begins anew; the link does not know of it."""
        self.hot[origin] = HotPrefixes(self.tree, BLOCK, self.config, self.now_s)
        self.publish(self.told.forget(origin))

    @rule(
        origin=st.integers(0, 3),
        root=st.sampled_from((ROOT, bytes(16))),
        since=st.integers(-1, 5),
        version=st.integers(-1, 5),
        added=st.binary(max_size=40),
        removed=st.binary(max_size=40),
        chunk_tokens=st.sampled_from((BLOCKS * BLOCK, 16)),
    )
    def hostile(self, **fields: object) -> None:
        """What is refused changes nothing; what is taken in is claimed and no more, and ends with its origin."""
        message = PrefixSummary(**fields)
        before = {chunk for chunk in self.ever if chunk in self.told}
        try:
            self.publish(self.told.take(message, self.now_s))
        except ProtocolError:
            assert before == {chunk for chunk in self.ever if chunk in self.told}
        else:
            assert message.root == ROOT
            assert message.chunk_tokens == BLOCKS * BLOCK
            self.publish(self.told.forget(message.origin))
            for origin in (1, 2):
                if message.origin == origin:
                    self.hot[origin] = HotPrefixes(self.tree, BLOCK, self.config, self.now_s)

    @rule(seconds=st.sampled_from((0.2, 0.5, 1.0, EXPIRES_S + 1)))
    def passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.publish(self.told.expire(self.now_s))
        if seconds > EXPIRES_S:
            assert not len(self.told), "silent processes tell nothing"
            assert not self.index.num_chunks

    @rule()
    def settles(self) -> None:
        """Without changes the link comes to know exactly what is held of what is told, within the seconds that its bytes take."""
        for _ in range(200):
            self.passes(0.5)
            for origin in (1, 2):
                self.asks(origin)
        held = set().union(*(self.held[slot] for slot in np.flatnonzero(READY).tolist()))
        told = {chunk for hot in self.hot.values() for chunk in hot._advertised}
        assert told <= held
        assert told == {chunk for chunk in self.ever if chunk in self.told}
        assert len(told) == len(self.told)
        for hot in self.hot.values():
            for chunks, looks in hot._waiting:
                lacking = [
                    chunk for chunk in chunks.tolist() if chunk in held and chunk not in hot._advertised
                ]
                assert not lacking or looks == 0, "all that is held and was noted is told"

    # -- the router that is told

    def take(self, summary: PrefixSummary) -> None:
        self.publish(self.told.take(summary, self.now_s))

    def publish(self, events: object) -> None:
        self.publisher.publish(events)
        assert self.index.apply(LINK, events, BLOCK) == 0

    @rule()
    def reconnects(self) -> None:
        """A router that begins anew gets a snapshot of the link's content."""
        self.index = RegionIndex()
        for part in self.publisher.events_after(None):
            if isinstance(part, EventSnapshot):
                self.index.replace(LINK, part, BLOCK)

    @invariant()
    def claims_no_more_than_told(self) -> None:
        if not hasattr(self, "told"):
            return
        self.told.check()
        self.index.check()
        for hot in self.hot.values():
            hot.check()
        assert self.index.num_chunks == len(self.told)
        assert self.sent_bytes <= self.config.bytes_per_s * 2 * self.now_s + 16, (
            "two routers, each within its bytes"
        )
        none = PrefixMatch(np.zeros(SLOTS, dtype=np.int32))
        for family in range(6):
            path = path_of((family, CHUNKS))
            depths = self.index.deepened(none, path, BLOCK, (LINK,)).depths
            chunks = chunk_hashes(path, BLOCK).tolist()
            deepest = depths[LINK] // BLOCKS
            assert deepest == 0 or chunks[deepest - 1] in self.told, "a depth was told"
            assert deepest == CHUNKS or not all(chunk in self.told for chunk in chunks[: deepest + 1])
            assert depths[0] == depths[2] == 0, "workers of this region are as they were"


TestSummaries = Summaries.TestCase
TestSummaries.settings = settings(stateful_step_count=30, deadline=None)


def test_a_full_summary_makes_room_for_hotter_prefixes_and_repairs_who_is_far_behind() -> None:
    tree, config = RadixTree(None, 1), PrefixSummaryConfig(bytes_per_s=1_000_000, chunks_max=1024)
    hot, ready = HotPrefixes(tree, BLOCK, config, 0.0), np.array([True])
    told, behind, now_s = AdvertisedPrefixes(ROOT, BLOCK), AdvertisedPrefixes(ROOT, BLOCK), 0.0

    def read(target: AdvertisedPrefixes) -> int:
        changes = hot.changes(target.after.get(1, 0), 100_000, ready, now_s)
        target.take(PrefixSummary(origin=1, root=ROOT, chunk_tokens=256, **changes._asdict()), now_s)
        return changes.since

    for number in range(12_000):
        chunk = np.arange(4 * number + 1, 4 * number + 5, dtype=np.uint64)
        tree.store(0, chunk, None)
        for _ in range(2 if number % 100 == 0 else 1):
            hot.note(chunk)
        if number % 100 == 99:
            now_s += 1.0
            read(told)
            hot.check()
        if number == 1000:
            read(behind)
    assert len(hot) <= 1024
    assert {*hot._advertised} == {*told._claims}
    assert 11_999 * 4 + 4 in told, "the latest"
    assert read(behind) == 0, "what was taken back meanwhile is not kept: all anew"
    assert {*hot._advertised} == {*behind._claims}
