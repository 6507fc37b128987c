"""Workers of a host share an arena; one is killed while it offloads: any cache lines that it was writing may be old or new.

No worker ever loads a wrong block, and what nobody has overwritten or damaged is loaded by all.
"""

import asyncio

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.kv.host_arena import ExtentLayout
from tests.support.shared_host import SharedHost
from tests.support.slots import chain

SLOTS, BLOCK_BYTES, LINE_BYTES = 6, 512, 64
LAYOUT = ExtentLayout(SLOTS, BLOCK_BYTES)
CHAINS = [chain(4, first) for first in range(1, 5)]
workers = st.integers(0, 1)
chains = st.sampled_from(CHAINS)
lengths = st.integers(1, 4)


class HostArenaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.host = SharedHost(slots=SLOTS, block_bytes=BLOCK_BYTES)
        self.workers = [self.host.worker(number) for number in range(2)]
        self.has_damage = False

    @rule(number=workers, hashes=chains, length=lengths)
    def offload(self, number: int, hashes, length: int) -> None:
        worker = self.workers[number]
        self.loop.run_until_complete(worker.offload(hashes[:length]))
        assert worker.tier.locate(hashes[:length]) == length

    @rule(number=workers, hashes=chains, start=st.integers(0, 3))
    def load(self, number: int, hashes, start: int) -> None:
        worker = self.workers[number]
        located = worker.tier.locate(hashes[start:])
        count = self.loop.run_until_complete(worker.load(hashes[start:]))
        assert count <= located
        assert count == located or self.has_damage, "nobody has changed anything meanwhile"

    @rule(number=workers, hashes=chains, others=st.lists(chains, max_size=3))
    def load_while_the_other_offloads(self, number: int, hashes, others) -> None:
        worker, other = self.workers[number], self.workers[1 - number]

        async def main() -> None:
            begun = worker.begin_load(hashes)
            for each in others:
                await other.offload(each)
            worker.check_loaded(hashes, await begun)

        self.loop.run_until_complete(main())

    @rule(number=workers, hashes=chains, length=lengths, seed=st.integers(0, 2**32))
    def kill_while_it_offloads(self, number: int, hashes, length: int, seed: int) -> None:
        extent = self.host.extent(number)
        before = extent.copy()
        worker = self.workers[number]
        self.loop.run_until_complete(worker.offload(hashes[:length]))
        worker.kill()
        lines = len(extent) // LINE_BYTES
        is_new = np.random.default_rng(seed).random(lines) < (seed % 5) / 4
        old = before.reshape(lines, LINE_BYTES)
        extent.reshape(lines, LINE_BYTES)[~is_new] = old[~is_new]
        self.has_damage = True
        self.workers[number] = self.host.worker(number)

    @rule(number=workers)
    def restart(self, number: int) -> None:
        kept = self.workers[number].tier.num_cached
        self.loop.run_until_complete(self.workers[number].tier.close())
        self.workers[number] = self.host.worker(number)
        assert self.workers[number].tier.num_cached == kept or self.has_damage

    @rule(number=workers)
    def clear(self, number: int) -> None:
        self.workers[number].tier.clear()
        assert not any(self.workers[number].tier.locate(hashes) for hashes in CHAINS)

    @rule(number=workers, where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def flip(self, number: int, where: float, bit: int) -> None:
        first = LAYOUT.records_offset
        self.host.extent(number)[first + int(where * (LAYOUT.size_bytes - first))] ^= 1 << bit
        self.has_damage = True

    @invariant()
    def indexes_are_sound(self) -> None:
        for worker in self.workers:
            worker.tier.check()

    def teardown(self) -> None:
        for worker in self.workers:
            self.loop.run_until_complete(worker.tier.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.host.arena.close()


TestHostArena = HostArenaMachine.TestCase
TestHostArena.settings = settings(stateful_step_count=30, deadline=None)
