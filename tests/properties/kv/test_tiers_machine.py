"""Pools on top of each other, and prefixes fetched from them, against lists of texts; contents are moved and compared."""

from collections import Counter

import numpy as np
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.core.hashing import block_hashes
from penstock.core.types.events import AllBlocksCleared, BlockStored, Tier
from penstock.core.wire import unpack_hashes
from penstock.kv.pool.pool import BlockPool
from penstock.kv.tiers.onboarding import Onboarding
from penstock.kv.tiers.tiers import TieredPool

BLOCK_SIZE = 2
BLOCKS = {Tier.DEVICE: 5, Tier.HOST: 4, Tier.DISK: 6}
# a block's content is one letter, and a prefix is named by its text
texts = st.sampled_from(["ab", "abba", "abab", "b", "bab", "bb", "aaab", "bbab"])


def hashes_of(text):
    tokens = np.repeat(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32), BLOCK_SIZE)
    return block_hashes(tokens, BLOCK_SIZE)


def prefixes(text, start=0):
    return [text[: end + 1] for end in range(start, len(text))]


def chains(victims):
    """Join victims, oldest first, to chains: parents before children."""
    joined = []
    for prefix in reversed(victims):
        if joined and joined[-1][-1] == prefix[:-1]:
            joined[-1].append(prefix)
        else:
            joined.append([prefix])
    return joined[::-1]


class NaiveTier:
    def __init__(self, size, beneath):
        self.size = size
        self.beneath = beneath
        self.order = []  # of nobody, oldest first
        self.held = Counter()

    @property
    def content(self):
        return {*self.order, *self.held}

    def hold(self, prefix):
        if prefix in self.order:
            self.order.remove(prefix)
        self.held[prefix] += 1

    def let_go(self, texts):
        for prefix in reversed(texts):
            self.held[prefix] -= 1
            if not self.held[prefix]:
                del self.held[prefix]
                self.order.append(prefix)

    def make_room(self, count):
        lacking = count - (self.size - len(self.content))
        victims = self.order[: max(lacking, 0)]
        del self.order[: len(victims)]
        for chain in chains(victims):
            self.beneath.keep(chain) if self.beneath else None

    def keep(self, chain):
        known = [prefix for prefix in chain if prefix in self.content]
        for prefix in known:
            self.hold(prefix)
        new = [prefix for prefix in chain if prefix not in known][: self.size - len(self.held)]
        self.make_room(len(new))
        self.held.update(new)
        self.let_go([prefix for prefix in chain if prefix in known or prefix in new])


class TextMover:
    """Moves texts; a fetch reads what it reads when it ends."""

    def __init__(self):
        self.cells = {tier: [None] * size for tier, size in BLOCKS.items()}
        self.under_way = {}

    def write_back(self, source, target):
        for block_id, into in zip(source.block_ids, target.block_ids, strict=True):
            assert self.cells[source.tier][block_id] is not None
            self.cells[target.tier][into] = self.cells[source.tier][block_id]

    def worth(self, runs, cached_tokens, known_tokens):
        return len(runs)

    def fetch(self, fetch, done):
        self.under_way[fetch] = done

    def cancel(self, fetch):
        self.under_way.pop(fetch, None)

    def arrive(self, fetch):
        cells = [self.cells[tier][block_id] for tier, ids in fetch.sources for block_id in ids]
        for target, text in zip(fetch.targets, cells, strict=True):
            self.cells[Tier.DEVICE][target] = text
        self.under_way.pop(fetch)()


class Request:
    """Its blocks from `hits` on are not published."""

    def __init__(self, name, text, hits):
        self.name = name
        self.text = text
        self.hits = hits
        self.block_ids = []
        self.sources = []
        self.is_fetching = False


class TiersMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        device, *lower = [BlockPool(size, BLOCK_SIZE, tier=tier) for tier, size in BLOCKS.items()]
        self.copier = TextMover()
        self.pool = TieredPool(device, lower, self.copier)
        self.arrivals = 0
        self.onboarding = Onboarding(self.pool, self.copier, self.on_arrival)
        self.disk = NaiveTier(BLOCKS[Tier.DISK], None)
        self.host = NaiveTier(BLOCKS[Tier.HOST], self.disk)
        self.cache = {}  # device: prefix -> block
        self.unused_since = {}
        self.clock = 0
        self.live = []
        self.number = 0
        self.told = {tier: set() for tier in BLOCKS}
        self.parents = {}

    def on_arrival(self):
        self.arrivals += 1

    # ---- the device, naively --------------------------------------------------------------------------
    def held(self):
        return Counter(block_id for request in self.live for block_id in request.block_ids)

    def available(self):
        return BLOCKS[Tier.DEVICE] - len(self.held())

    def expect_allocated(self, count):
        held = self.held()
        idle = [prefix for prefix, block_id in self.cache.items() if block_id not in held]
        idle.sort(key=self.unused_since.__getitem__)
        victims = idle[: max(0, count - (self.available() - len(idle)))]
        for prefix in victims:
            del self.cache[prefix]
        for chain in chains(victims):
            self.host.keep(chain)

    def expect_runs(self, text, depth):
        """Say what is beneath: runs of (tier, prefixes)."""
        runs = []
        tiers = {Tier.DEVICE: self.cache, Tier.HOST: self.host.content, Tier.DISK: self.disk.content}
        left = prefixes(text, depth)
        while left:
            tier = next((tier for tier, content in tiers.items() if left[0] in content), None)
            if tier is None:
                break
            run = left[: next((n for n, p in enumerate(left) if p not in tiers[tier]), len(left))]
            runs.append((tier, run))
            left = left[len(run) :]
        return runs

    # ---- rules ----------------------------------------------------------------------------------------
    @rule(text=texts)
    def admit(self, text):
        hashes = hashes_of(text)
        hits = self.pool.match(hashes)
        runs = self.onboarding.worth(hashes, hits, len(text) * BLOCK_SIZE)
        expected = self.expect_runs(text, len(hits))
        assert [(run.tier, len(run.block_ids)) for run in runs] == [(t, len(found)) for t, found in expected]
        held = hits + [block_id for run in runs if run.tier is Tier.DEVICE for block_id in run.block_ids]
        if len(text) - len(held) > self.pool.num_available - self.pool.count_idle(held):
            return
        self.number += 1
        request = Request(f"r{self.number}", text, len(hits))
        self.pool.acquire(hits)
        request.block_ids += hits
        self.live.append(request)
        if runs:
            event(f"fetched from {', '.join(dict.fromkeys(run.tier for run in runs))}")
            self.begin(request, runs, expected)
        else:
            self.compute(request)

    @rule(several=st.lists(texts, min_size=3, max_size=8))
    def serve(self, several):
        """One after the other, from beginning to end."""
        for text in several:
            before = len(self.live)
            self.admit(text)
            for fetch in list(self.copier.under_way):
                self.copier.arrive(fetch)
            self.take_arrived()
            if len(self.live) > before:
                self.release(self.live[-1])

    def begin(self, request, runs, expected):
        lower = {Tier.HOST: self.host, Tier.DISK: self.disk}
        for tier, found in expected:
            if tier is not Tier.DEVICE:
                request.sources.append((lower[tier], found))
                for prefix in found:
                    lower[tier].hold(prefix)
        fetched = sum(len(found) for _, found in request.sources)
        device = [block_id for run in runs if run.tier is Tier.DEVICE for block_id in run.block_ids]
        request.block_ids += device  # taken before anything is allocated
        self.expect_allocated(fetched)
        del request.block_ids[request.hits :]
        request.block_ids += self.onboarding.begin(request.name, runs)
        request.is_fetching = True
        assert self.onboarding.is_under_way(request.name)

    def compute(self, request):
        count = len(request.text) - len(request.block_ids)
        if count > self.available():
            self.release(request)
            return
        self.expect_allocated(count)
        request.block_ids += self.pool.allocate(count)
        for block_id, prefix in (
            list(zip(request.block_ids, prefixes(request.text), strict=True))[-count:] if count else ()
        ):
            self.copier.cells[Tier.DEVICE][block_id] = prefix
        self.publish(request, request.hits)

    def publish(self, request, start):
        end = len(request.block_ids)
        for block_id, prefix in zip(request.block_ids, prefixes(request.text), strict=False):
            assert self.copier.cells[Tier.DEVICE][block_id] == prefix, "KV of another prefix"
        hashes = hashes_of(request.text)
        self.pool.commit(
            request.block_ids[start:end], hashes[start:end], int(hashes[start - 1, 0]) if start else None
        )
        for index in range(len(hashes)):
            self.parents[int(hashes[index, 0])] = int(hashes[index - 1, 0]) if index else None
        for prefix, block_id in zip(
            prefixes(request.text)[start:end], request.block_ids[start:end], strict=True
        ):
            self.cache.setdefault(prefix, block_id)

    @rule(data=st.data())
    def arrive(self, data):
        if self.copier.under_way:
            index = data.draw(st.integers(0, len(self.copier.under_way) - 1))
            before = self.arrivals
            self.copier.arrive(list(self.copier.under_way)[index])
            assert self.arrivals == before + 1
            assert self.onboarding.has_arrived

    @rule()
    def take_arrived(self):
        taken = self.onboarding.take_arrived()
        arrived = [next(request for request in self.live if request.name == name) for name, _ in taken]
        assert [request.hits + count for request, (_, count) in zip(arrived, taken, strict=True)] == [
            len(request.block_ids) for request in arrived
        ]
        for request in arrived:  # all of them let go of what they read before one of them needs room
            self.end(request)
        for request in arrived:
            self.publish(request, request.hits)
            request.hits = len(request.block_ids)
            self.compute(request)
        assert not self.onboarding.has_arrived

    @rule(data=st.data())
    def leave(self, data):
        if self.live:
            self.release(data.draw(st.sampled_from(self.live)))

    def release(self, request):
        self.onboarding.cancel(request.name)
        if request.is_fetching:
            self.end(request)
        self.pool.release(request.block_ids)
        self.live.remove(request)
        held = self.held()
        for block_id, prefix in list(zip(request.block_ids, prefixes(request.text), strict=False))[::-1]:
            if self.cache.get(prefix) == block_id and block_id not in held:
                self.clock += 1
                self.unused_since[prefix] = self.clock

    def end(self, request):
        request.is_fetching = False
        for tier, found in request.sources:
            tier.let_go(found)

    @rule()
    def reset(self):
        if not self.live:
            self.pool.reset()
            self.cache.clear()
            self.host.order.clear()
            self.disk.order.clear()

    @rule()
    def read_events(self):
        for change in self.pool.take_events():
            if isinstance(change, AllBlocksCleared):
                for known in self.told.values():
                    known.clear()
                continue
            hashes = unpack_hashes(change.block_hashes).tolist()
            known = self.told[change.tier]
            if isinstance(change, BlockStored):
                assert known.isdisjoint(hashes), "stored twice"
                assert [self.parents[h] for h in hashes] == [change.parent_block_hash, *hashes[:-1]]
                known.update(hashes)
            else:
                assert known.issuperset(hashes), "removed but never stored"
                known.difference_update(hashes)
        for pool in self.pool.tiers:
            assert self.told[pool.tier] == {int(row[0]) for row in pool.resident_hashes()}

    # ---- invariants -----------------------------------------------------------------------------------
    @invariant()
    def tiers_hold_what_the_lists_say(self):
        self.pool.check()
        self.onboarding.check()
        contents = (self.cache, self.host.content, self.disk.content)
        for pool, content in zip(self.pool.tiers, contents, strict=True):
            names = {tuple(hashes_of(prefix)[-1].tolist()) for prefix in content}
            assert {tuple(row) for row in pool.resident_hashes().tolist()} == names, pool.tier
            assert len(content) <= BLOCKS[pool.tier]
        assert self.pool.num_available == self.available()
        for pool in self.pool.tiers[1:]:
            for prefix in self.host.content if pool.tier is Tier.HOST else self.disk.content:
                (block_id,) = pool.match(hashes_of(prefix)[-1:])
                assert self.copier.cells[pool.tier][block_id] == prefix, "KV of another prefix"

    def teardown(self):
        self.read_events()


TiersMachine.TestCase.settings = settings(stateful_step_count=30)
TestTiersMachine = TiersMachine.TestCase
