"""The longest single steps of an event loop with a large prefix index, for which other requests wait.

Steps are timed in CPU time, so that other work on the machine matters little.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from prometheus_client import CollectorRegistry

from penstock.core.ids import WorkerId
from penstock.core.types.events import BlockStored, EventSnapshot
from penstock.core.types.instances import EngineInfo, Instance, ModelCard, Role
from penstock.core.types.kv import KvExchange
from penstock.core.wire import HashArray, pack_hashes
from penstock.router.config import RouterConfig
from penstock.router.fleet.links import KvTransferPairs
from penstock.router.indexer import Indexer
from penstock.router.metrics import RouterMetrics
from penstock.router.radix import RadixTree
from penstock.runtime.events.publisher import EventPublisher

_EVENT_BLOCKS = 64
_BLOCK_SIZE = 16
_HUB_CHILDREN = 200_000
_HOSTS = 200
_RECLAIMED_AT_ONCE = 1024

T = TypeVar("T")


class _Longest:
    """Keeps the longest step."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def step(self, call: Callable[[], T]) -> T:
        begin = time.thread_time()
        result = call()
        self.seconds = max(self.seconds, time.thread_time() - begin)
        return result


def longest_steps_s(pairs: int, seed: int) -> dict[str, float]:
    """Give the longest step of each kind, in seconds, with so many (worker, block) pairs."""
    rng = np.random.default_rng(seed)
    count = max(pairs // _EVENT_BLOCKS, 1)
    chains = rng.integers(0, 1 << 64, (count, _EVENT_BLOCKS), dtype=np.uint64)
    return {
        **_tree_steps(chains),
        **_hub_steps(rng.integers(0, 1 << 64, min(_HUB_CHILDREN, pairs), dtype=np.uint64)),
        **asyncio.run(_snapshot_steps(chains)),
        "kv_transfer_pairs": _pair_step(),
    }


def _tree_steps(chains: HashArray) -> dict[str, float]:
    """Fill an index past its bound, and remove a worker that holds half of it."""
    store, evict, clear, reclaim = _Longest(), _Longest(), _Longest(), _Longest()
    tree = RadixTree(chains.size, 2)
    for index, chain in enumerate(chains):
        store.step(lambda chain=chain, index=index: tree.store(index % 2, chain))  # type: ignore[misc]
    for index, chain in enumerate(chains[: len(chains) // 4] ^ np.uint64(1)):
        evict.step(lambda chain=chain, index=index: tree.store(index % 2, chain))  # type: ignore[misc]
    clear.step(lambda: tree.clear(0))
    while reclaim.step(lambda: tree.reclaim(_RECLAIMED_AT_ONCE)):
        pass
    return {
        "store": store.seconds,
        "evict": evict.seconds,
        "clear": clear.seconds,
        "reclaim": reclaim.seconds,
    }


def _hub_steps(children: HashArray) -> dict[str, float]:
    """Remove and store a block with very many children."""
    hub, longest = np.array([1], dtype=np.uint64), _Longest()
    tree = RadixTree(None, 1)
    tree.store(0, hub)
    for index in range(len(children)):
        tree.store(0, children[index : index + 1], 1)
    longest.step(lambda: tree.remove(0, hub))
    longest.step(lambda: tree.store(0, hub))
    return {"hub": longest.seconds}


async def _snapshot_steps(chains: HashArray) -> dict[str, float]:
    """Make a worker's snapshot, and apply it at a router."""
    made, applied, lost = _Longest(), _Longest(), _Longest()
    publisher = EventPublisher()
    indexer = Indexer(RouterConfig(), RouterMetrics(CollectorRegistry()))
    for chain in chains:
        event = BlockStored(block_hashes=pack_hashes(chain), parent_block_hash=None, block_size=_BLOCK_SIZE)
        publisher.publish((event,))
    messages = made.step(lambda: publisher.events_after(None))
    while (message := made.step(lambda: next(messages, messages))) is not messages:
        if isinstance(message, EventSnapshot):
            applied.step(lambda part=message: indexer.replace(0, part, _BLOCK_SIZE))  # type: ignore[misc]
    lost.step(lambda: indexer.forget(0))
    return {
        "snapshot_made": made.seconds,
        "snapshot_applied": applied.seconds,
        "worker_lost": lost.seconds,
    }


def _pair_step() -> float:
    """Find out which workers can transfer KV to which others, each worker on a host of its own."""
    longest, found = _Longest(), KvTransferPairs()
    engine = EngineInfo(
        block_size=_BLOCK_SIZE, total_blocks=1, context_length=16, max_batch_tokens=1, max_running_requests=1
    )
    card = ModelCard(name="m", block_size=_BLOCK_SIZE, context_length=16, salt=b"")
    for slot in range(_HOSTS):
        exchange = KvExchange(transports=("tcp",), listens=("tcp",), host=b"%d" % slot)
        role = Role.PREFILL if slot % 2 else Role.DECODE
        instance = Instance(
            worker_id=WorkerId(slot),
            name=str(slot),
            address="",
            role=role,
            card=card,
            engine=engine,
            exchange=exchange,
        )
        found.put(slot, instance)
    longest.step(lambda: found.kinds(_HOSTS))
    longest.step(lambda: found.prefill_workers(np.ones(_HOSTS, np.bool_), np.ones(_HOSTS, np.bool_)))
    return longest.seconds
