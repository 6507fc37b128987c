"""Two writers of packs, collection, and a store that damages and loses objects. No wrong block is ever served."""

import asyncio
import contextlib

import numpy as np
import obstore
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from obstore.store import MemoryStore

from penstock.kv.block_store import Namespace
from penstock.kv.object_packs import ObjectPacks
from penstock.kv.pack_index import PacksConfig
from tests.support.slots import NAMESPACE, chain, content, targets

BLOCK_BYTES = 512
CHAINS = [chain(4, first) for first in range(1, 4)]
OTHER = Namespace(model_digest="0the4", dtype="bfloat16", layout="layers", block_size=4)
CONFIG = PacksConfig(
    pack_bytes=3 * BLOCK_BYTES, gather_s=0.0, refresh_s=1000.0, retries=0, budget_bytes=12 * BLOCK_BYTES
)
WRITERS = st.integers(0, 2)  # 0 and 1 share a namespace, 2 has another


def blocks_of(hashes: np.ndarray, writer: int) -> np.ndarray:
    """Give blocks of equal hashes other bytes in the other namespace."""
    blocks = content(hashes, BLOCK_BYTES)
    return ~blocks if writer == 2 else blocks


class ObjectPacksMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.store = MemoryStore()
        self.stack = contextlib.AsyncExitStack()
        self.writers: list[ObjectPacks] = []
        self.stored: set[tuple[bool, bytes]] = set()
        self.is_intact = True  # nobody damaged or deleted an object
        self.runner.run(self._open())

    async def _open(self) -> None:
        self.leave = asyncio.Event()
        self.owners = [asyncio.get_running_loop().create_task(self._own(n)) for n in range(3)]
        while len(self.writers) < 3:  # noqa: ASYNC110 - they need one turn
            await asyncio.sleep(0)
        self.writers.sort(key=lambda packs: packs.order)

    async def _own(self, n: int) -> None:
        packs = ObjectPacks(self.store, BLOCK_BYTES, OTHER if n == 2 else NAMESPACE, CONFIG)
        packs.order = n
        async with packs:
            self.writers.append(packs)
            await self.leave.wait()

    @rule(writer=WRITERS, which=st.sampled_from(CHAINS), start=st.integers(0, 3), count=st.integers(1, 4))
    def put(self, writer: int, which: np.ndarray, start: int, count: int) -> None:
        hashes = which[start : start + count]
        parent = int(which[start - 1, 0]) if start else None
        packs = self.writers[writer]
        held = self.runner.run(packs.store(hashes, blocks_of(hashes, writer), parent=parent))
        assert held == len(hashes) == packs.locate(hashes)
        self.stored |= {(writer == 2, row.tobytes()) for row in hashes}

    @rule(which=st.sampled_from(CHAINS), start=st.integers(0, 2))
    def put_by_two_at_once(self, which: np.ndarray, start: int) -> None:
        hashes = which[start:]

        async def both() -> None:
            async with asyncio.TaskGroup() as group:
                for writer in (0, 1):
                    group.create_task(self.writers[writer].store(hashes, blocks_of(hashes, writer)))

        self.runner.run(both())
        self.stored |= {(False, row.tobytes()) for row in hashes}

    @rule(writer=WRITERS, which=st.sampled_from(CHAINS), start=st.integers(0, 3))
    def load(self, writer: int, which: np.ndarray, start: int) -> None:
        hashes, packs = which[start:], self.writers[writer]
        into, located = targets(len(hashes), BLOCK_BYTES), packs.locate(hashes)
        loaded = self.runner.run(packs.load(hashes, into))
        assert (into[:loaded] == blocks_of(hashes[:loaded], writer)).all(), "a wrong block"
        assert {(writer == 2, row.tobytes()) for row in hashes[:loaded]} <= self.stored
        if self.is_intact:
            assert loaded == located, "what is held is loaded"
        if loaded < located:
            assert packs.locate(hashes) <= located
            assert packs.counts.mismatched + packs.counts.packs_gone > 0

    @rule(writer=WRITERS)
    def refresh(self, writer: int) -> None:
        self.runner.run(self.writers[writer].refresh())

    @rule(writer=WRITERS)
    def collect(self, writer: int) -> None:
        if self.runner.run(self.writers[writer].collect()):
            self.is_intact = False
        assert sum(row["size"] for row in obstore.list(self.store).collect()) <= CONFIG.budget_bytes

    @rule(reader=WRITERS)
    def copy_all_packs_to_all_namespaces(self, reader: int) -> None:
        for row in obstore.list(self.store).collect():
            raw, name = bytes(obstore.get(self.store, row["path"]).bytes()), row["path"].rpartition("/")[2]
            for namespace in (NAMESPACE, OTHER):
                obstore.put(self.store, f"kv/{namespace.digest.hex()}/{name}", raw)
        self.runner.run(self.writers[reader].refresh())

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        keys = sorted(row["path"] for row in obstore.list(self.store).collect())
        if not keys:
            return
        self.is_intact = False
        key = data.draw(st.sampled_from(keys))
        raw = bytearray(bytes(obstore.get(self.store, key).bytes()))
        at = data.draw(st.integers(0, len(raw)))
        match data.draw(st.integers(0, 4)):
            case 0:
                raw[at % max(len(raw), 1) : at + 1] = b"?"
            case 1:
                del raw[at:]
            case 2:
                obstore.delete(self.store, key)
                return
            case 3:  # another pack's bytes, perhaps of the other namespace
                raw = bytearray(bytes(obstore.get(self.store, data.draw(st.sampled_from(keys))).bytes()))
        obstore.put(self.store, key, bytes(raw))

    @invariant()
    def the_indexes_are_sound(self) -> None:
        for packs in self.writers:
            packs.check()

    def teardown(self) -> None:
        async def close() -> None:
            self.leave.set()
            await asyncio.gather(*self.owners)

        self.runner.run(close())
        self.runner.close()


ObjectPacksMachine.TestCase.settings = settings(stateful_step_count=30, deadline=None)
TestObjectPacksMachine = pytest.mark.slow(ObjectPacksMachine.TestCase)
