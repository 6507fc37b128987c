"""A dispatcher with workers on manual engines, on virtual time, for router tests."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from penstock.core.hashing import block_hashes
from penstock.core.ids import RequestId
from penstock.core.types.events import BlockStored
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_hashes, pack_tokens
from penstock.router.config import RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.router.fleet.member import FleetWorkerView
from penstock.sim.loop import run_virtual
from tests.support.cluster import MemoryCluster
from tests.support.manual_engine import ManualEngine
from tests.support.scenes import scenes

PROMPT = tuple(range(100, 121))
"""Five full blocks of four tokens, and one token."""
HASHES = block_hashes(PROMPT, 4, b"tiny-1")[:, 0]
"""(5,) uint64, low64 of its block hashes."""

Engines = dict[str, ManualEngine]
"""Engines by worker name: `w1`, `w2` and so on."""
Scene = Callable[[MemoryCluster, Dispatcher, Engines], Awaitable[None]]


def run_scenario(scene: Scene, num_workers: int = 3, config: RouterConfig | None = None) -> None:
    """Run a scene once all workers are registered, and check the dispatcher's state afterwards."""

    async def main() -> None:
        async with MemoryCluster() as cluster, cluster.dispatcher(config) as dispatcher:
            engines = {f"w{number}": ManualEngine() for number in range(1, num_workers + 1)}
            for name, engine in engines.items():
                await cluster.start(name, engine)
            await asyncio.sleep(0.01)
            await scene(cluster, dispatcher, engines)
            dispatcher.check()

    run_virtual(main())


scenario = scenes(run_scenario, 3)
"""Makes a decorator of tests that are scenes; takes the options of `run_scenario`."""


async def settle() -> None:
    """Run everything that is ready."""
    for _ in range(20):
        await asyncio.sleep(0)


def make_request(
    request_id: str = "r", prompt: Sequence[int] = PROMPT, *, max_tokens: int = 9, **fields: Any
) -> Request:
    """Make a request for some tokens after a prompt; `fields` are its own."""
    usual: dict[str, Any] = {
        "model": "tiny",
        "salt": b"tiny-1",
        "sampling": SamplingParams(max_tokens=max_tokens),
    }
    return Request(request_id=RequestId(request_id), token_ids=pack_tokens(prompt), **usual | fields)


def stored(hashes: np.ndarray) -> BlockStored:
    """Make the stored event of these blocks, the first of them at the root."""
    return BlockStored(block_hashes=pack_hashes(hashes), parent_block_hash=None, block_size=4)


def view(dispatcher: Dispatcher, name: str) -> FleetWorkerView:
    """Return the dispatcher's description of one worker."""
    (found,) = (worker for worker in dispatcher.workers() if worker.name == name)
    return found
