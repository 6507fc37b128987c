"""What workers share is told by one of them and counted for all: hosts, object stores, and who tells when one is lost."""

import asyncio

from msgspec.structs import replace

from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Holder, Tier
from penstock.core.types.instances import EngineInfo, KvHolder
from penstock.core.types.load import KvTierCounts
from penstock.core.wire import pack_hashes
from penstock.sim.loop import run_virtual
from tests.support.cluster import MemoryCluster
from tests.support.manual_engine import ManualEngine
from tests.support.scene import HASHES, make_request, settle, view
from tests.support.scenes import scenes

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
        self.engines = {}

    async def start(self, name, *holders):
        self.engines[name] = SharingEngine(*holders)
        await self.cluster.start(name, self.engines[name])
        await asyncio.sleep(0.5)

    async def tell(self, *names, events):
        for name in names:
            self.engines[name].step(events=events)
        await settle()

    async def tiers(self):
        """Give the blocks of the prompt that each worker can load, by tier: device, host, disk, object."""
        async with self.dispatcher.open(make_request("asked")):
            (decision,) = self.dispatcher.latest_decisions(1)
            return {each.worker: [*each.tier_blocks.values()] for each in decision.candidates}


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


scenario = scenes(run, 1)()


@scenario
async def test_a_hosts_blocks_are_told_once_and_counted_for_all_its_workers(scene):
    await scene.tell("w1", "w2", events=[stored(0, 3, Holder.HOST)])
    assert await scene.tiers() == {"w1": [0, 3, 0, 0], "w2": [0, 3, 0, 0], "w3": [0, 0, 0, 0]}
    await scene.tell("w2", events=[stored(0, 2, Holder.WORKER, Tier.DEVICE)])
    await scene.tell("w1", "w2", "w3", events=[stored(0, 5, Holder.FLEET, Tier.OBJECT)])
    assert await scene.tiers() == {"w1": [0, 3, 0, 2], "w2": [2, 1, 0, 2], "w3": [0, 0, 0, 5]}
    removed = BlockRemoved(block_hashes=pack_hashes(HASHES[:3]), tier=Tier.HOST, holder=Holder.HOST)
    await scene.tell("w1", "w2", events=[removed])
    assert (await scene.tiers())["w2"] == [2, 0, 0, 3]
    assert view(scene.dispatcher, "w2").indexed_blocks == 2


@scenario
async def test_when_the_teller_is_lost_another_one_tells_and_nothing_is_forgotten_meanwhile(scene):
    await scene.tell("w1", "w2", events=[stored(0, 3, Holder.HOST)])
    scene.cluster.kill("w1")
    await asyncio.sleep(0.001)
    assert (await scene.tiers())["w2"] == [0, 3, 0, 0]
    await asyncio.sleep(10)
    await scene.tell("w2", events=[stored(3, 4, Holder.HOST)])
    assert await scene.tiers() == {"w2": [0, 4, 0, 0], "w3": [0, 0, 0, 0]}
    await scene.start("w1", host("A"), FLEET)
    assert (await scene.tiers())["w1"] == [0, 4, 0, 0], "before it has told anything"


@scenario
async def test_a_teller_that_forgets_what_others_keep_is_replaced(scene):
    await scene.tell("w1", "w2", events=[stored(0, 3, Holder.HOST)])
    await scene.tell("w1", events=[AllBlocksCleared(holder=Holder.HOST)])
    assert (await scene.tiers())["w1"] == [0, 3, 0, 0]
    await scene.tell("w1", events=[stored(3, 5, Holder.HOST)])
    assert (await scene.tiers())["w2"] == [0, 3, 0, 0], "it is not asked any more"
