"""Both sides of a KV connector over host memory, with an engine's scheduler and device played by the test."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.hashing import block_hashes
from penstock.core.wire import HashArray
from penstock.kv.connector.orders import Orders, Report
from penstock.kv.connector.scheduler import KvConnectorScheduler
from penstock.kv.connector.staging import Staging
from penstock.kv.connector.worker import KvConnectorWorker
from penstock.kv.device_blocks import DeviceBlocks
from penstock.kv.groups import KvGroups
from penstock.kv.host_tier import HostTier
from penstock.seams.kv import KvTier

BLOCK_SIZE = 4
BLOCK_BYTES = 4096
WAIT_S = 30.0


class Memory:
    """A device's blocks, (num_blocks, block_bytes)."""

    block_bytes = BLOCK_BYTES

    def __init__(self, num_blocks: int) -> None:
        self.blocks: NDArray[np.uint8] = np.zeros((num_blocks, BLOCK_BYTES), np.uint8)

    def read(self, block_ids: Sequence[int], slots: DeviceBlocks, slot_ids: Sequence[int]) -> None:
        for view, block_id in zip(slots.views(slot_ids), block_ids, strict=True):
            view[:] = self.blocks[block_id]

    def write(self, block_ids: Sequence[int], slots: DeviceBlocks, slot_ids: Sequence[int]) -> None:
        for view, block_id in zip(slots.views(slot_ids), block_ids, strict=True):
            self.blocks[block_id] = view


class Connected:
    """A scheduler's side and one or more device processes; `step` carries their messages, pickled as between processes.

    Its `DeviceCache` takes block ids as keys; those in `evicted` are gone.
    """

    def __init__(
        self,
        make_tiers: Callable[[Staging], Sequence[KvTier]],
        *,
        num_blocks: int = 64,
        num_ranks: int = 1,
        groups: KvGroups | None = None,
    ) -> None:
        self.memories = [Memory(num_blocks) for _ in range(num_ranks)]
        self.workers = [KvConnectorWorker(make_tiers, memory) for memory in self.memories]
        self.pinned: list[int] = []
        self.evicted: set[int] = set()
        self.now_s = 0.0
        self.scheduler = KvConnectorScheduler(
            self,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            num_ranks=num_ranks,
            groups=groups,
            clock=lambda: self.now_s,
        )
        self.reports: list[Report] = []
        self.step()

    def pin(self, keys: Sequence[Any]) -> list[int]:
        ids = []
        for key in keys:
            if key in self.evicted:
                break
            ids.append(key)
        self.pinned += ids
        return ids

    def unpin(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.pinned.remove(block_id)

    def step(self, *, is_waiting: bool = True) -> Orders:
        """Carry out what was ordered, and report it; `is_waiting` waits for the copies."""
        orders: Orders = pickle.loads(pickle.dumps(self.scheduler.take_orders()))
        for worker in self.workers:
            worker.submit(orders)
        by_rank = {}
        for rank, worker in enumerate(self.workers):
            if is_waiting:
                assert worker.wait(WAIT_S)
            report = worker.take_report()
            if report is not None:
                by_rank[rank] = pickle.loads(pickle.dumps(report))
                self.reports.append(report)
        self.scheduler.take_reports(by_rank)
        self.scheduler.check()
        return orders

    def fill(self, block_ids: Sequence[int], seed: int) -> None:
        """Write content that is of these tokens alone to device blocks."""
        for rank, memory in enumerate(self.memories):
            for number, block_id in enumerate(block_ids):
                rng = np.random.default_rng([seed, number, rank])
                memory.blocks[block_id] = rng.integers(0, 256, BLOCK_BYTES, np.uint8)

    def holds(self, block_ids: Sequence[int], seed: int) -> bool:
        """Say whether device blocks have what `fill` wrote for this seed."""
        return all(
            np.array_equal(
                memory.blocks[block_id],
                np.random.default_rng([seed, number, rank]).integers(0, 256, BLOCK_BYTES, np.uint8),
            )
            for rank, memory in enumerate(self.memories)
            for number, block_id in enumerate(block_ids)
        )

    def keep(self, seed: int, count: int) -> HashArray:
        """Compute a prompt of so many blocks, have it offloaded, and lose it on the device."""
        hashes = hashes_of(seed, count)
        ids = list(range(count))
        self.fill(ids, seed)
        self.scheduler.commit(hashes, [ids])
        while self.scheduler.needs_steps:
            self.step()
        for memory in self.memories:
            memory.blocks[:] = 0
        return hashes

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def damage(tier: KvTier, block_hash: HashArray | None = None, *, byte: int = 7) -> None:
    """Flip a bit in a host tier: at `byte` of the block with a (1, 2) hash, or of all blocks together."""
    assert isinstance(tier, HostTier)
    slot = 0 if block_hash is None else tier._pool.match(block_hash)[0]
    tier._memory.own[tier._extent.layout.data_offset + slot * tier.block_bytes + byte] ^= 1


def hashes_of(seed: int, count: int) -> HashArray:
    """Hash a prompt of so many blocks."""
    tokens = np.random.default_rng(seed).integers(0, 9, BLOCK_SIZE * count, np.int32)
    return block_hashes(tokens, BLOCK_SIZE)
