"""What workers share is told by one of them and counted for all: hosts, object stores, and who tells when one is lost."""

import asyncio

import numpy as np
from msgspec.structs import replace

from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Holder, Tier
from penstock.core.types.instances import EngineInfo, KvHolder
from penstock.core.types.load import KvTierCounts
from penstock.core.wire import pack_hashes
from penstock.sim.loop.loop import run_virtual
from tests.support.cluster import MemoryCluster
from tests.support.manual_engine import ManualEngine
from tests.support.scene import HASHES, make_request, settle, view

INFO = EngineInfo(
    block_size=4, total_blocks=100, context_length=400, max_batch_tokens=64, max_running_requests=8
)
FLEET = KvHolder(kind=Holder.FLEET, id="store", blocks=500)


def host(name: str) -> KvHolder:
    return KvHolder(kind=Holder.HOST, id=name, blocks=200)


class SharingEngine(ManualEngine):
    def __init__(self, *holders: KvHolder) -> None:
        super().__init__(replace(INFO, kv_holders=holders))
        self.off: set[Tier] = set()

    def load(self):
        tiers = (Tier.HOST, Tier.OBJECT)
        counts = tuple(KvTierCounts(tier=tier, is_off=tier in self.off) for tier in tiers)
        return replace(super().load(), kv_tiers=counts)


def stored(start: int, end: int, holder: Holder, tier: Tier = Tier.HOST) -> BlockStored:
    parent = int(HASHES[start - 1]) if start else None
    return BlockStored(
        block_hashes=pack_hashes(HASHES[start:end]),
        parent_block_hash=parent,
        block_size=4,
        tier=tier,
        holder=holder,
    )


class Scene:
    """Workers w1, w2 on host A, w3 on host B, all with one object store; and a router."""

    def __init__(self, cluster, dispatcher):
        self.cluster, self.dispatcher = cluster, dispatcher
        self.fleet = dispatcher._shared.fleet
        self.engines = {}

    async def start(self, name, *holders):
        self.engines[name] = SharingEngine(*holders)
        await self.cluster.start(name, self.engines[name])
        await asyncio.sleep(0.5)

    async def tell(self, *names, events):
        for name in names:
            self.engines[name].step(events=events)
        await settle()

    def depths(self):
        """Blocks of the prompt by worker: (in all tiers, by tier)."""
        match = self.fleet.tree.match(HASHES)
        slots = {member.instance.name: member.slot for member in self.fleet.slots.now() if member}
        return {name: match.depths[slot] for name, slot in sorted(slots.items())}

    def tiers(self, name):
        slot = next(m.slot for m in self.fleet.slots.now() if m and m.instance.name == name)
        return self.fleet.tree.match(HASHES).tiers[:, slot].tolist()

    @property
    def holders(self):
        return self.fleet._connector.holders

    def tellers(self):
        return {key: shared.teller.instance.name for key, shared in self.holders._shared.items()}


def run(scene):
    async def main():
        async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
            made = Scene(cluster, dispatcher)
            await made.start("w1", host("A"), FLEET)
            await made.start("w2", host("A"), FLEET)
            await made.start("w3", host("B"), FLEET)
            await scene(made)
            dispatcher.check()

    run_virtual(main())


def test_a_hosts_blocks_are_told_once_and_counted_for_all_its_workers():
    async def scene(scene):
        await scene.tell("w1", "w2", events=[stored(0, 3, Holder.HOST)])
        assert scene.depths() == {"w1": 3, "w2": 3, "w3": 0}
        assert scene.fleet.tree.stats().pairs == 3
        await scene.tell("w2", events=[stored(0, 2, Holder.WORKER, Tier.DEVICE)])
        assert (scene.tiers("w1"), scene.tiers("w2")) == ([0, 3, 0, 0], [2, 1, 0, 0])
        await scene.tell("w1", "w2", "w3", events=[stored(0, 5, Holder.FLEET, Tier.OBJECT)])
        assert scene.depths() == {"w1": 5, "w2": 5, "w3": 5}
        assert (scene.tiers("w2"), scene.tiers("w3")) == ([2, 1, 0, 2], [0, 0, 0, 5])
        await scene.tell(
            "w1",
            "w2",
            events=[BlockRemoved(block_hashes=pack_hashes(HASHES[:3]), tier=Tier.HOST, holder=Holder.HOST)],
        )
        assert scene.tiers("w2") == [2, 0, 0, 3]
        assert view(scene.dispatcher, "w2").indexed_blocks == 2

    run(scene)


def test_a_block_between_those_of_the_host_may_be_the_workers_own():
    async def scene(scene):
        await scene.tell("w1", "w2", events=[stored(0, 2, Holder.HOST), stored(3, 5, Holder.HOST)])
        assert scene.depths() == {"w1": 2, "w2": 2, "w3": 0}
        await scene.tell("w2", events=[stored(2, 3, Holder.WORKER, Tier.DEVICE)])
        assert scene.depths() == {"w1": 2, "w2": 5, "w3": 0}

    run(scene)


def test_when_the_teller_is_lost_another_one_tells_and_nothing_is_forgotten_meanwhile():
    async def scene(scene):
        await scene.tell("w1", "w2", events=[stored(0, 3, Holder.HOST)])
        assert scene.tellers() == {
            (Holder.HOST, "A"): "w1",
            (Holder.HOST, "B"): "w3",
            (Holder.FLEET, "store"): "w1",
        }
        scene.cluster.kill("w1")
        await asyncio.sleep(0.001)
        assert scene.depths()["w2"] == 3
        await asyncio.sleep(10)
        assert scene.tellers() == {
            (Holder.HOST, "A"): "w2",
            (Holder.HOST, "B"): "w3",
            (Holder.FLEET, "store"): "w2",
        }
        await scene.tell("w2", events=[stored(3, 4, Holder.HOST)])
        assert scene.depths() == {"w2": 4, "w3": 0}
        await scene.start("w1", host("A"), FLEET)
        assert scene.depths()["w1"] == 4, "before it has told anything"

    run(scene)


def test_a_host_without_workers_is_forgotten_and_an_arena_made_anew_is_another_one():
    async def scene(scene):
        await scene.tell("w1", "w2", events=[stored(0, 3, Holder.HOST)])
        for name in ("w1", "w2"):
            scene.cluster.kill(name)
        await asyncio.sleep(10)
        assert (len(scene.holders), scene.fleet.tree.stats().pairs) == (2, 0)
        await scene.start("w1", host("A, made anew"), FLEET)
        assert scene.depths() == {"w1": 0, "w3": 0}
        await scene.tell("w1", events=[stored(0, 1, Holder.HOST)])
        assert scene.depths() == {"w1": 1, "w3": 0}

    run(scene)


def test_a_teller_that_forgets_what_others_keep_is_replaced():
    async def scene(scene):
        await scene.tell("w1", "w2", events=[stored(0, 3, Holder.HOST)])
        await scene.tell("w1", events=[AllBlocksCleared(holder=Holder.HOST)])
        assert scene.tellers()[Holder.HOST, "A"] == "w2"
        assert scene.depths() == {"w1": 3, "w2": 3, "w3": 0}
        await scene.tell("w1", events=[stored(3, 5, Holder.HOST)])
        assert scene.depths()["w2"] == 3, "it is not asked any more"
        await scene.tell("w2", events=[AllBlocksCleared(holder=Holder.HOST)])
        assert scene.tellers()[Holder.HOST, "A"] == "w1"
        assert scene.depths()["w2"] == 0, "the first block is on neither"
        await scene.tell("w3", events=[stored(0, 1, Holder.HOST), AllBlocksCleared(holder=Holder.HOST)])
        assert scene.depths()["w3"] == 0, "it is the only one that tells"

    run(scene)


def test_a_tier_that_is_off_counts_for_others_alone():
    async def scene(scene):
        await scene.tell("w1", "w2", "w3", events=[stored(0, 5, Holder.FLEET, Tier.OBJECT)])
        scene.engines["w2"].off.add(Tier.OBJECT)
        await scene.tell("w2", events=[stored(0, 1, Holder.WORKER, Tier.DEVICE)])
        await asyncio.sleep(1)
        assert scene.depths() == {"w1": 5, "w2": 1, "w3": 5}
        scene.engines["w2"].off.clear()
        await scene.tell("w2", events=[stored(0, 1, Holder.WORKER, Tier.DEVICE)])
        await asyncio.sleep(1)
        assert scene.depths()["w2"] == 5

    run(scene)


def test_a_missing_batch_of_a_host_is_asked_for_again():
    async def scene(scene):
        await scene.tell("w1", "w2", events=[stored(0, 3, Holder.HOST)])
        worker = scene.cluster.worker("w1")
        publisher = worker.publishers.shared[Holder.HOST]
        sinks, publisher._sinks = publisher._sinks, []
        publisher.publish([stored(3, 4, Holder.HOST)])  # lost on its way
        publisher._sinks = sinks
        publisher.publish([stored(4, 5, Holder.HOST)])
        await asyncio.sleep(5)
        assert scene.depths()["w2"] == 5

    run(scene)


def test_a_request_goes_to_any_worker_of_the_host():
    async def scene(scene):
        await scene.tell("w1", "w2", events=[stored(0, 5, Holder.HOST)])
        async with scene.dispatcher.open(make_request("a")), scene.dispatcher.open(make_request("b")):
            chosen = scene.dispatcher.latest_decisions(2)
            assert {decision.worker for decision in chosen} == {"w1", "w2"}
            assert [c.tier_blocks["host"] for c in chosen[-1].candidates] == [5, 5, 0]

    run(scene)


def test_slots_of_holders_are_given_back():
    async def scene(scene):
        for _ in range(5):
            for name in ("w1", "w2", "w3"):
                scene.cluster.kill(name)
            await asyncio.sleep(10)
            assert len(scene.holders) == 0
            for name, where in (("w1", "A"), ("w2", "A"), ("w3", "B")):
                await scene.start(name, host(where), FLEET)
        assert len(scene.fleet.slots.now()) <= 6
        assert np.count_nonzero(scene.fleet.slots.worker_ids) == 3

    run(scene)
