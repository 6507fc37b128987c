"""Invariants of a simulated deployment under faults."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.errors import DeadlineExceeded, EngineError, Overloaded, PenstockError, Unavailable
from penstock.core.ids import WorkerId
from penstock.core.types.events import Tier
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import token_list, unpack_hashes
from penstock.kv.pool import BlockPool
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.router.workers.member import Condition
from penstock.sim.engine.timed_tier import TimedTier
from penstock.sim.world.cluster import SimCluster, SimEngine

ALLOWED_ERRORS = (DeadlineExceeded, Overloaded, Unavailable, EngineError)
"""Errors that a valid request may end with under faults."""
DEADLINE_GRACE_S = 1e-6


def check_now(cluster: SimCluster) -> None:
    """Check the invariants that hold at every moment: each component's state is consistent."""
    for dispatcher in cluster.dispatchers:
        dispatcher.check()
    for worker in cluster.workers.values():
        worker.worker.check()
        worker.engine.check()


async def keep_checking(cluster: SimCluster, interval_s: float) -> None:
    """Check until cancelled."""
    while True:
        await asyncio.sleep(interval_s)
        check_now(cluster)


def check_at_rest(cluster: SimCluster) -> None:
    """Check that no state of any request remains, and that every index equals the workers' caches.

    For workers without KV events, check that the index's predictions have expired.

    Call it once all requests have ended, all faults are over, and reports and events have arrived.
    """
    check_now(cluster)
    cluster.network.check_at_rest()
    for server in cluster.plane.servers.values():
        for link in server.links:
            assert not link.direct, f"{server.address}: {len(link.direct)} direct streams of no request"
    truth = {w.name: w.worker.publishers.ranks[0].mirror.counts() for w in cluster.workers.values()}
    for worker in cluster.workers.values():
        load = worker.engine.load()
        assert load.running_requests == load.waiting_requests == 0, f"{worker.host}: still runs {load}"
        assert load.active_blocks == 0, f"{worker.host}: {load.active_blocks} blocks are held by no request"
        if worker.worker.kv_transfer is not None:
            worker.worker.kv_transfer.check_idle()
        assert worker.worker.instance is not None, f"{worker.host}: registered"
        if not worker.worker.instance.engine.kv_events:
            assert not truth[worker.name], f"{worker.host}: sends events though it says that it does not"
            continue
        announced = truth[worker.name].keys()
        for tier in Tier:
            held = {h for pool in _pools(worker.engine) if pool.tier is tier for h in _names(pool)}
            on_tier = {block_hash for block_hash, of in announced if of is tier}
            assert held == on_tier, (
                f"{worker.host}: {len(held)} blocks are cached on {tier}, and its events tell of {len(on_tier)}"
            )
    for dispatcher in cluster.dispatchers:
        _check_dispatcher_at_rest(dispatcher, truth)


def _check_dispatcher_at_rest(dispatcher: Dispatcher, truth: dict[str, dict[tuple[int, Tier], int]]) -> None:
    shared = dispatcher._shared
    assert not shared.requests, f"still open: {list(shared.requests)}"
    assert not shared.request_queue.num_queued, f"{shared.request_queue.num_queued} requests are still queued"
    shared.retry_guard.check_at_rest()
    views = dispatcher.workers()
    ready = {view.name for view in views if view.condition in {Condition.READY, Condition.PREFILL_ONLY}}
    assert ready == truth.keys(), f"ready are {sorted(ready)}, alive {sorted(truth)}"
    for view in views:
        assert view.open_requests == 0, f"{view.name}: {view.open_requests} requests are open"
        reserved = (view.reserved_requests, view.reserved_prefill_tokens, view.reserved_blocks)
        assert reserved == (0, 0, 0), f"{view.name}: {reserved} is reserved without a request"
        load = view.load or {}
        peers = (load.get("peer_requests"), load.get("peer_prefill_tokens"), load.get("peer_prefill_pairs"))
        assert peers == (0, 0, 0), f"{view.name}: {peers} reported for other routers without requests there"
        slot = shared.fleet.slot_of(WorkerId(view.worker_id))
        assert slot is not None, f"{view.name} has no slot"
        chains = shared.fleet.tree.snapshot(slot)
        held = {(name, chain.tier) for chain in chains for name in unpack_hashes(chain.hashes).tolist()}
        expected = truth[view.name].keys()
        assert held == expected, (
            f"{view.name}: {len(held - expected)} blocks are indexed that it does not hold, and "
            f"{len(expected - held)} are not that it holds"
        )


def _pools(engine: SimEngine) -> list[BlockPool]:
    """List the pools of a device and of the tiers below it."""
    lower = () if engine.kv is None else engine.kv.tiers
    return [engine.pool, *(tier.pool for tier in lower if isinstance(tier, TimedTier))]


def _names(pool: BlockPool) -> list[int]:
    names: list[int] = pool.resident_hashes()[:, 0].tolist()
    return names


async def touch_every_worker(cluster: SimCluster, requests: Sequence[Request]) -> None:
    """Send each worker one request, so that a lost event shows as a gap in its sequence.

    Args:
        cluster: has as many ready workers as `requests`.
        requests: each of at least one uncached block.
    """
    dispatcher = await cluster.add_frontend(cluster.spec.router.model_copy(update={"policy": "round-robin"}))
    await dispatcher.serving()
    await asyncio.sleep(1.0)
    for request in requests:
        async with dispatcher.open(request) as stream:
            async for _ in stream:
                pass


@dataclass(slots=True)
class StreamChecker:
    """Compares one stream with the output of an undisturbed engine."""

    request: Request
    expected: Sequence[int]
    opened_s: float
    received: int = 0
    finish_reason: FinishReason | None = None

    def see(self, delta: Delta) -> None:
        """Check the next delta."""
        name = self.request.request_id
        assert self.finish_reason is None, f"{name}: a delta after the last one"
        tokens = token_list(delta.token_ids)
        end = self.received + len(tokens)
        assert tokens == list(self.expected[self.received : end]), (
            f"{name}: output tokens {self.received} to {end} are {tokens}, expected {list(self.expected[self.received : end])}"
        )
        self.received = end
        self.finish_reason = delta.finish_reason

    def end(self, error: PenstockError | None, now_s: float, *, grace_s: float = 0.0) -> None:
        """Check the stream's end; not called by a reader that left early.

        Args:
            error: error of the stream, None for a whole answer.
            now_s: virtual time at which the reader learned of the end.
            grace_s: longest time for which the reader did not read.
        """
        name, deadline_s = self.request.request_id, self.request.deadline_s
        if error is None:
            assert self.finish_reason is FinishReason.LENGTH, f"{name}: ended with {self.finish_reason}"
            assert self.received == len(self.expected), (
                f"{name}: ended after {self.received} of {len(self.expected)} tokens"
            )
        else:
            assert isinstance(error, ALLOWED_ERRORS), f"{name}: {error!r} is no fault of a worker"
            assert deadline_s is not None or not isinstance(error, DeadlineExceeded), (
                f"{name}: it has no deadline, and {error!r}"
            )
        if deadline_s is not None:
            assert now_s <= self.opened_s + deadline_s + grace_s + DEADLINE_GRACE_S, (
                f"{name}: ended {now_s - self.opened_s:g} s after it was opened, its deadline was {deadline_s:g} s"
            )
