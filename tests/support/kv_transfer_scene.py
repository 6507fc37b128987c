"""A deployment with prefill and decode workers on virtual time, for tests of KV transfers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from penstock.core.types.instances import Prices, Role
from penstock.engine.batched import BatchedEngine
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.sim.loop import run_virtual
from penstock.transfer.transports.memory import MemoryTransport
from penstock.worker.config import WorkerConfig
from tests.support.cluster import MemoryCluster, memory_transport
from tests.support.kv_transfer import PRICES, check_nothing_is_held, tiny_engine, tiny_request
from tests.support.scenes import scenes

ALWAYS = RouterConfig(policy="least-loaded", disagg=DisaggConfig(remote_tokens_min=1))
"""Every prompt is disaggregated while a prefill worker is available."""
_ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "a": Role.AGGREGATED}
_REPORTED_S = 0.2
"""By then workers have reported their load."""
_IDLE_S = 60.0
"""By then all timers, such as those of pins, have ended."""

_T = TypeVar("_T")

Scene = Callable[[MemoryCluster, Dispatcher], Awaitable[None]]


def run_scenario(
    scene: Scene,
    names: Sequence[str] = ("p0", "d0"),
    *,
    router: RouterConfig = ALWAYS,
    registry: CollectorRegistry | None = None,
    engine: Callable[[str], BatchedEngine] = lambda _name: tiny_engine(),
    transport: Callable[[], MemoryTransport | None] = memory_transport,
    config: WorkerConfig | None = None,
    prices: Mapping[Role, Prices] | None = None,
) -> None:
    """Run a scene once all workers are registered, and check a minute later that no worker holds anything of a request.

    Args:
        scene: called with the cluster and the dispatcher of one frontend.
        names: names of the workers; the first letter is the role: p(refill), d(ecode) or a(ggregated).
        router: config of the dispatcher.
        registry: registry for the dispatcher's metrics.
        engine: makes the engine of the worker of this name.
        transport: makes the transport of each worker; None: only roles that need one have one.
        config: config of all workers.
        prices: prices by role, instead of `PRICES`.
    """

    async def main() -> None:
        async with MemoryCluster() as cluster:
            for name in names:
                role = _ROLES[name[0]]
                await cluster.start(
                    name,
                    engine(name),
                    role=role,
                    prices=(prices or {}).get(role, PRICES),
                    config=config,
                    transport=transport(),
                )
            async with cluster.dispatcher(router, registry) as dispatcher:
                await dispatcher.looked()
                await scene(cluster, dispatcher)
                await asyncio.sleep(_IDLE_S)
                for name in cluster.names:
                    left = cluster.engine(name)
                    assert isinstance(left, BatchedEngine), "run other engines elsewhere"
                    check_nothing_is_held(cluster.worker(name), left)
                assert dispatcher._shared.request_queue.num_queued == 0
                dispatcher.check()

    run_virtual(main())


scenario = scenes(run_scenario, 2)
"""Makes a decorator of tests that are scenes; takes the options of `run_scenario`."""


def load_of(dispatcher: Dispatcher, name: str) -> Mapping[str, Any]:
    """Give what a worker has told of its load."""
    (load,) = (view.load for view in dispatcher.workers() if view.name == name)
    assert load is not None, "it has told nothing yet"
    return load


async def beside_streams(
    dispatcher: Dispatcher, run: Callable[[], Awaitable[_T]], streams: int, prompt_tokens: int = 12
) -> _T:
    """Run something while several streams are decoding, then end the streams.

    Args:
        dispatcher: dispatcher of the scene.
        run: called while the streams run; its result is returned.
        streams: number of streams, each with 380 tokens to decode.
        prompt_tokens: prompt length of each stream.
    """
    async with AsyncExitStack() as stack:
        for number in range(streams):
            asked = tiny_request(f"stream{number}", prompt_tokens, 380, seed=100 + number)
            await anext(await stack.enter_async_context(dispatcher.open(asked)))
        await asyncio.sleep(_REPORTED_S)
        return await run()
