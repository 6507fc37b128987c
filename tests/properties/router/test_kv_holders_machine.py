"""The index of shared blocks: whatever workers, hosts and tiers do, a router counts for each worker what it can load."""

import asyncio

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Holder, Tier
from penstock.core.types.instances import KvHolder
from penstock.core.wire import pack_hashes
from penstock.sim.loop import SimLoop
from tests.support.cluster import MemoryCluster
from tests.unit.router.fleet.test_kv_holders import SharingEngine

NAMES = st.sampled_from(["w1", "w2", "w3", "w4"])
HOST_OF = {"w1": "A", "w2": "A", "w3": "B", "w4": "B"}
NODES = st.integers(1, 26)
SHARED_TIER = {Holder.HOST: Tier.HOST, Holder.FLEET: Tier.OBJECT}
HOLDERS = st.sampled_from(list(SHARED_TIER))


def chain_to(node: int) -> list[int]:
    """Blocks of a small forest: block b has the parent b // 3."""
    path = []
    while node:
        path.append(node)
        node //= 3
    return path[::-1]


class HoldersMachine(RuleBasedStateMachine):
    """Workers come and go, store, lose and forget blocks; the model keeps who keeps what, and what each worker sees of it."""

    def __init__(self):
        super().__init__()
        self.loop = SimLoop()
        self.engines: dict[str, SharingEngine] = {}
        self.own: dict[str, set[int]] = {}
        self.kept: dict[tuple[Holder, str], set[int]] = {}
        """Blocks that holders keep, by kind and id."""
        self.seen: dict[tuple[str, Holder], set[int]] = {}
        """Those of them that a worker can load: all but what it has forgotten."""
        self.arenas = {"A": 0, "B": 0}
        self.run(self._begin())

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    async def _serve(self):
        async with MemoryCluster() as self.cluster, self.cluster.dispatcher() as self.dispatcher:
            await self.over.wait()

    async def _begin(self):
        self.over = asyncio.Event()
        self.serving = asyncio.get_running_loop().create_task(self._serve())
        await asyncio.sleep(1)

    def teardown(self):
        async def end():
            self.over.set()
            await self.serving

        self.run(end())
        self.loop.close()

    async def _kill(self, name):
        self.cluster.kill(name)

    def key(self, name, kind):
        host = HOST_OF[name]
        return (kind, f"{host}{self.arenas[host]}") if kind is Holder.HOST else (kind, "store")

    def tell(self, name, *events):
        self.engines[name].step(events=events)

    @staticmethod
    def stored(nodes, holder, tier):
        """One event a block: what is stored need not be a chain."""
        return [
            BlockStored(
                block_hashes=pack_hashes([node]),
                parent_block_hash=node // 3 or None,
                block_size=4,
                tier=tier,
                holder=holder,
            )
            for node in sorted(nodes)
        ]

    @rule(name=NAMES)
    def start(self, name):
        if name in self.engines:
            return
        keys = [self.key(name, kind) for kind in SHARED_TIER]
        engine = self.engines[name] = SharingEngine(*(KvHolder(kind=kind, id=which) for kind, which in keys))
        self.run(self.cluster.start(name, engine))
        self.own[name] = set()
        for kind, which in keys:
            kept = self.kept.setdefault((kind, which), set())
            self.seen[name, kind] = set(kept)
            self.tell(name, *self.stored(kept, kind, SHARED_TIER[kind]))

    @rule(name=NAMES)
    def kill(self, name):
        if name in self.engines:
            self.run(self._kill(name))
            del self.engines[name], self.own[name]
            for kind in SHARED_TIER:
                del self.seen[name, kind]

    @rule(host=st.sampled_from("AB"))
    def make_an_arena_anew(self, host):
        for name in [name for name in self.engines if HOST_OF[name] == host]:
            self.kill(name)
        self.arenas[host] += 1

    @rule(name=NAMES, node=NODES, skip=st.integers(0, 2))
    def store_on_the_device(self, name, node, skip):
        if name in self.engines:
            new = set(chain_to(node)[skip:]) - self.own[name]
            self.own[name] |= new
            self.tell(name, *self.stored(new, Holder.WORKER, Tier.DEVICE))

    @rule(name=NAMES, node=NODES, skip=st.integers(0, 2), kind=HOLDERS)
    def store_for_others(self, name, node, skip, kind):
        """Blocks are stored where others read them, who tell of them likewise."""
        if name not in self.engines:
            return
        key = self.key(name, kind)
        new = set(chain_to(node)[skip:]) - self.kept[key]
        self.kept[key] |= new
        for other in [other for other in self.engines if self.key(other, kind) == key]:
            self.seen[other, kind] |= new
            self.tell(other, *self.stored(new, kind, SHARED_TIER[kind]))

    @rule(name=NAMES, node=NODES, kind=HOLDERS)
    def remove_for_all(self, name, node, kind):
        if name not in self.engines:
            return
        key = self.key(name, kind)
        self.kept[key].discard(node)
        for other in [other for other in self.engines if self.key(other, kind) == key]:
            if node in self.seen[other, kind]:
                self.seen[other, kind].remove(node)
                removed = BlockRemoved(block_hashes=pack_hashes([node]), tier=SHARED_TIER[kind], holder=kind)
                self.tell(other, removed)

    @rule(name=NAMES, kind=HOLDERS)
    def forget(self, name, kind):
        """One worker clears its cache; what others keep stays theirs."""
        if name in self.engines:
            self.seen[name, kind] = set()
            self.tell(name, AllBlocksCleared(holder=kind))

    @rule(name=NAMES, tier=st.sampled_from([Tier.HOST, Tier.OBJECT]))
    def turn_off_or_on(self, name, tier):
        if name in self.engines:
            self.engines[name].off ^= {tier}
            self.tell(name, *self.stored([], Holder.WORKER, Tier.DEVICE))

    @invariant()
    def counts_what_each_worker_can_load(self):
        self.run(asyncio.sleep(12))  # leases end, and what was lost is asked for
        self.dispatcher.check()
        fleet = self.dispatcher._shared.fleet
        members = {member.instance.name: member for member in fleet.slots.now() if member is not None}
        assert members.keys() == self.engines.keys()
        told = {
            key: set(fleet.tree.hashes_of(shared.slot).tolist())
            for key, shared in fleet._connector.holders._shared.items()
        }
        expected = {self.key(name, kind) for name in self.engines for kind in SHARED_TIER}
        assert told.keys() == expected, "holders are known as long as anybody loads from them"
        for (kind, which), blocks in told.items():
            views = [self.seen[name, kind] for name in self.engines if self.key(name, kind) == (kind, which)]
            assert blocks in views, f"{kind} {which} is known as one of its workers sees it"
        for name, member in members.items():
            loads = set(self.own[name])
            for kind, tier in SHARED_TIER.items():
                if tier not in self.engines[name].off:
                    loads |= told[self.key(name, kind)]
            for node in (7, 13, 22, 26):
                path = chain_to(node)
                depth = next((at for at, block in enumerate(path) if block not in loads), len(path))
                assert fleet.tree.match(np.array(path, np.uint64)).depths[member.slot] == depth


TestHoldersMachine = HoldersMachine.TestCase
TestHoldersMachine.settings = settings(stateful_step_count=20, deadline=None)
