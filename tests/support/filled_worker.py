"""Workers in processes of their own whose caches are full, and a router that starts and does not know them."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock.core.ids import WorkerId
from penstock.core.types.events import BlockStored
from penstock.core.types.instances import Instance
from penstock.core.wire import PackedHashes
from penstock.router.config import RouterConfig
from penstock.router.fleet.fleet import Fleet
from penstock.router.metrics import RouterMetrics
from penstock.runtime.discovery.view import MemoryDiscovery
from penstock.runtime.handshake import Identity
from penstock.runtime.requests.tcp import TcpPlane
from penstock.testing.planes.peer import Cues, Peer
from penstock.testing.planes.scripted_worker import ScriptedWorker, scripted_instance

_SECRET = b"of full workers"
_CHAIN_BLOCKS = 64


async def full_worker(cues: Cues, worker_id: WorkerId, blocks: int) -> None:
    """Serve a worker that holds so many blocks, in chains."""
    worker = ScriptedWorker()
    hashes = np.random.default_rng(worker_id).integers(1, 1 << 63, size=blocks, dtype=np.uint64)
    for first in range(0, blocks, _CHAIN_BLOCKS):
        packed = PackedHashes(hashes[first : first + _CHAIN_BLOCKS].tobytes())
        worker.publisher.publish([BlockStored(block_hashes=packed, parent_block_hash=None, block_size=16)])
    plane = TcpPlane(Identity(process="full", worker_id=worker_id, secret=_SECRET))
    server = await plane.serve(worker)
    cues.say_ready(server.address)
    await cues.end.wait()
    await server.close()


@asynccontextmanager
async def full_workers(number: int, blocks: int) -> AsyncIterator[list[Instance]]:
    """Have so many workers, each with so many blocks."""
    async with AsyncExitStack() as stack:
        instances = []
        for worker_id in range(1, number + 1):
            peer = await Peer.start(full_worker, worker_id, blocks)
            stack.push_async_callback(peer.close)
            instance = scripted_instance(peer.value, worker_id=worker_id, pid=peer.pid)
            engine = msgspec.structs.replace(instance.engine, total_blocks=blocks)
            instances.append(msgspec.structs.replace(instance, engine=engine))
        yield instances


@dataclass(frozen=True, slots=True)
class Started:
    """Seconds from the start of a router.

    ready_s: until it could choose among all workers.
    whole_s: until its index had all their blocks.
    turn_cpu_s_max: the most CPU seconds of one turn of its loop meanwhile, in which it would have answered nothing.
    blocks_when_ready: blocks in its index as soon as it could choose.
    """

    ready_s: float
    whole_s: float
    turn_cpu_s_max: float
    blocks_when_ready: int


async def start_router(instances: list[Instance], blocks: int) -> Started:
    """Start a router's fleet, and follow it until its index is whole."""
    discovery = MemoryDiscovery()
    for instance in instances:
        await discovery.register(instance)
    plane = TcpPlane(Identity(process="router", secret=_SECRET))
    fleet = Fleet(discovery, plane, config=RouterConfig(), metrics=RouterMetrics(None), rng=random.Random(1))
    loop = asyncio.get_running_loop()
    began_s, last_cpu_s = loop.time(), time.thread_time()
    turn_cpu_s_max, ready_s, at_ready = 0.0, None, 0
    running = asyncio.create_task(fleet.run())
    try:
        while True:
            await asyncio.sleep(0)
            now_s, now_cpu_s = loop.time(), time.thread_time()
            turn_cpu_s_max, last_cpu_s = max(turn_cpu_s_max, now_cpu_s - last_cpu_s), now_cpu_s
            slots = [fleet.slot_of(instance.worker_id) for instance in instances]
            held = sum(fleet.tree.held_blocks(slot) for slot in slots if slot is not None)
            if ready_s is None and "scripted" in fleet.pools:
                pool = fleet.pools["scripted"]
                if int(pool.ready.sum()) == len(instances):
                    ready_s, at_ready = now_s - began_s, held
            if held >= blocks * len(instances) and ready_s is not None:
                return Started(ready_s, now_s - began_s, turn_cpu_s_max, at_ready)
    finally:
        running.cancel()
        await asyncio.wait((running,))
