"""A client that reads as those of a frontend do: tokens come to its transport by a rule wherever they may, and else to a sink."""

import asyncio
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.core.errors import DeadlineExceeded, EngineError, Overloaded, PenstockError, Unavailable
from penstock.core.ids import WorkerId
from penstock.core.native import native
from penstock.core.types.events import Tier
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import num_tokens, pack_tokens, token_list, unpack_hashes
from penstock.kv.pool import BlockPool
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.router.fleet.member import Condition
from penstock.runtime.requests.direct_streams import DirectStream
from penstock.seams import DirectClient, Hold, Interrupt, RequestStream
from penstock.sim.cluster import SimCluster, SimEngine, SimWorker
from penstock.sim.engine_timing import TimedTier
from penstock.sim.network import REGISTRY


class FaultKind(StrEnum):
    KILL = "kill"  # the process is killed and replaced
    DRAIN = "drain"  # the worker drains and is replaced
    PAUSE = "pause"  # the process is stopped, then continues
    SLOW = "slow"  # its engine steps take longer
    PARTITION = "partition"  # no network between the worker and one frontend
    ISOLATE = "isolate"  # no network between the worker and the registry
    RESET = "reset"  # connections to one frontend are reset
    LEASE_LOSS = "lease_loss"  # the registry drops the worker, which registers again


SLOW_FACTOR = 5.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `worker` and `frontend` are positions among those that run at that moment."""

    at_s: float
    kind: FaultKind
    worker: int = 0
    frontend: int = 0
    duration_s: float = 0.0


def random_faults(
    rng: random.Random, *, count: int, duration_s: float, longest_s: float = 3.0
) -> list[Fault]:
    """Draw `count` random faults within `duration_s`, most of them short."""
    return sorted(
        (
            Fault(
                at_s=rng.uniform(0.0, duration_s),
                kind=rng.choice(tuple(FaultKind)),
                worker=rng.randrange(1 << 16),
                frontend=rng.randrange(1 << 16),
                duration_s=min(rng.expovariate(4.0 / longest_s), longest_s),
            )
            for _ in range(count)
        ),
        key=lambda fault: fault.at_s,
    )


class Chaos:
    """Injects faults into a cluster. Faults that end a worker leave at least `spare` workers."""

    def __init__(self, cluster: SimCluster, *, spare: int = 2) -> None:
        self.cluster = cluster
        self.done: list[Fault] = []
        """Faults injected; a fault without a target is skipped."""
        self._spare = spare
        self._names = 0
        self._group = asyncio.TaskGroup()

    async def run(self, faults: Sequence[Fault]) -> None:
        """Inject all faults; returns once every fault is over and every ended worker replaced."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        async with self._group:
            for fault in faults:
                await asyncio.sleep(start_s + fault.at_s - loop.time())
                self._happen(fault)

    def _happen(self, fault: Fault) -> None:
        living = [worker for worker in self.cluster.workers.values() if not worker.is_draining]
        ends = fault.kind in {FaultKind.KILL, FaultKind.DRAIN}
        if len(living) <= (self._spare if ends else 0):
            return
        worker = living[fault.worker % len(living)]
        hosts = self.cluster.frontend_hosts
        frontend = hosts[fault.frontend % len(hosts)]
        self.done.append(fault)
        self.cluster.settle(worker.name)
        match fault.kind:
            case FaultKind.KILL:
                self.cluster.kill(worker.name)
            case FaultKind.DRAIN:
                self.cluster.drain(worker.name)
            case FaultKind.RESET:
                self.cluster.plane.break_links(worker.host, frontend)
            case FaultKind.LEASE_LOSS:
                self.cluster.registry.lose_lease(worker.host)
            case _:
                self._group.create_task(self._last(fault, worker, frontend), name=f"fault {fault.kind}")
        if ends:
            self._names += 1
            self._group.create_task(
                self.cluster.start(f"replacement-{self._names}", worker.role), name="replacement"
            )

    async def _last(self, fault: Fault, worker: SimWorker, frontend: str) -> None:
        network = self.cluster.network
        match fault.kind:
            case FaultKind.PAUSE:
                worker.pace.stop()
                network.freeze(worker.host)
                await asyncio.sleep(fault.duration_s)
                network.thaw(worker.host)
                worker.pace.go_on()
            case FaultKind.SLOW:
                worker.pace.factor *= SLOW_FACTOR
                await asyncio.sleep(fault.duration_s)
                worker.pace.factor /= SLOW_FACTOR
            case _:
                other = frontend if fault.kind is FaultKind.PARTITION else REGISTRY
                network.cut(worker.host, other)
                await asyncio.sleep(fault.duration_s)
                network.mend(worker.host, other)


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


_TOKEN_BYTES = 8
_BUFFER_BYTES = 3 * _TOKEN_BYTES
"""With more unsent the client is behind."""


class _Decimals:
    """Decodes a token to its id and a space."""

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)


class DirectReader(asyncio.WriteTransport):
    """A sink, a `DirectSink`, and the transport of its rule. Checks all tokens in the order in which they come."""

    def __init__(self, checker: StreamChecker, *, pause_s: float, leaves_after: int | None) -> None:
        """Make a client.

        Args:
            checker: sees what comes.
            pause_s: how long it reads nothing once it is behind; 0: it reads at once.
            leaves_after: it is gone after so many tokens; if they are even, its reader is cancelled, as that of a handler is.
        """
        super().__init__()
        self._checker = checker
        self._pause_s = pause_s
        self._leaves_after = leaves_after
        self._cancels = leaves_after is not None and leaves_after % 2 == 0
        self._task: asyncio.Task[None] | None = None
        self._unsent_bytes = 0
        decoder = (
            _Decimals()
            if native is None
            else native.ByteDecoder(native.TokenTable(lambda token_id: b"%d " % token_id))
        )
        self.rule = DirectStream(decoder, b"", b"", is_chunked=False)

    async def read(self, stream: RequestStream) -> None:
        """Read a stream to its end, or until the client leaves.

        Raises:
            PenstockError: the stream failed.
        """
        self._task = asyncio.current_task()
        try:
            await stream.run(self._take, self)
        except ConnectionResetError:
            assert self.is_closing(), "it was told of as gone, and is not"
        except asyncio.CancelledError:
            if not self._has_left or self._task is None or self._task.uncancel():
                raise

    def _take(self, delta: Delta) -> Hold | None:
        self._see(delta, _TOKEN_BYTES * num_tokens(delta.token_ids))
        if delta.finish_reason is None and self.is_closing():
            raise ConnectionResetError("the client is gone")
        return self._drain if self._unsent_bytes > _BUFFER_BYTES else None

    def _see(self, delta: Delta, num_bytes: int) -> None:
        self._checker.see(delta)
        if self._pause_s:
            self._unsent_bytes += num_bytes
        if self._cancels and self._has_left and self._task is not None and not self._task.cancelling():
            self._task.cancel()

    async def _drain(self) -> None:
        await asyncio.sleep(self._pause_s)
        self._unsent_bytes = 0

    # -- DirectSink

    def open(self, interrupt: Interrupt) -> tuple[DirectStream, DirectClient]:
        gone = ConnectionResetError("the client is gone")
        return self.rule, DirectClient(
            self,
            _BUFFER_BYTES,
            lambda _gap_s: None,
            lambda is_gone: interrupt(gone if is_gone else self._drain),
        )

    # -- the transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        tokens = [int(token) for token in json.loads(bytes(data)).split()]
        request_id = self._checker.request.request_id
        self._see(Delta(request_id=request_id, token_ids=pack_tokens(tokens)), len(data))

    @property
    def _has_left(self) -> bool:
        return self._leaves_after is not None and self._checker.received >= self._leaves_after

    def is_closing(self) -> bool:
        return self._has_left and not self._cancels

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes
