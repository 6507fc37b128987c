"""The workers there are, seen from one frontend process: one connection each, and what each tells.

Discovery says who should be there; a connection says who is. A worker whose connection ends gets nothing
more and its prefixes are forgotten at once, though discovery may list it until its lease runs out; as long
as it is listed it is tried again. Workers are the truth: after every new connection their blocks are asked for anew.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import assert_never

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import PenstockError, ProtocolError, RequestError, Unavailable, WorkerLost
from penstock.core.ids import RequestId, WorkerId
from penstock.core.log import get_logger
from penstock.core.types import (
    CardFile,
    Delta,
    EventMessage,
    Instance,
    InstancePut,
    InstanceRemoved,
    InstanceState,
    ModelCard,
    Request,
    WatchSynced,
    WorkerLoad,
)
from penstock.router.config import RouterConfig
from penstock.router.indexer import Indexer
from penstock.router.loads import LoadTracker
from penstock.router.member import Condition, DeltaHandler, Member, WorkerView, identity
from penstock.router.metrics import RouterMetrics
from penstock.router.radix import RadixTree
from penstock.runtime.events.subscriber import EventSubscriber
from penstock.seams import Connection, Discovery, RequestPlane

FETCH_TIMEOUT_S = 30.0

_log = get_logger()


@dataclass(slots=True)
class Pool:
    """A model's workers that name their blocks alike. `ready` (num_slots,) says which may get a request now."""

    card: ModelCard
    ready: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))


class Fleet:
    """Keeps connections, prefix index and loads in step with the workers. One event loop owns it."""

    def __init__(
        self,
        discovery: Discovery,
        plane: RequestPlane,
        *,
        config: RouterConfig,
        metrics: RouterMetrics,
        rng: random.Random,
    ) -> None:
        self.tree = RadixTree(config.indexed_blocks_max)
        self._indexer = Indexer(self.tree, metrics)
        self.loads = LoadTracker()
        self.pools: dict[str, Pool] = {}
        self._discovery = discovery
        self._plane = plane
        self._config = config
        self._metrics = metrics
        self._rng = rng
        self._members: dict[WorkerId, Member] = {}
        self._by_slot: list[Member | None] = []
        self._left_out: dict[WorkerId, Instance] = {}
        self._listeners: list[Callable[[], None]] = []
        self._group: asyncio.TaskGroup | None = None
        self._note_conditions()

    async def run(self) -> None:
        """Follow discovery, and keep a connection to everybody in it, until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            # Cancelling arrives inside the iterator, as the body never waits: it cleans up by itself.
            async for change in self._discovery.watch():
                match change:
                    case InstancePut(instance=instance):
                        self._put(instance)
                    case InstanceRemoved(worker_id=worker_id, reason=reason):
                        self._remove(worker_id, reason)
                    case WatchSynced():
                        pass
                    case _:
                        assert_never(change)

    def models(self) -> dict[str, ModelCard]:
        """Name the models that some worker can take requests for now."""
        return {name: pool.card for name, pool in self.pools.items() if pool.ready.any()}

    def at(self, slot: int) -> Member:
        """Give the worker in a slot that a pool named."""
        member = self._by_slot[slot]
        assert member is not None, f"slot {slot} is free"
        return member

    def slot_of(self, worker_id: WorkerId) -> int | None:
        member = self._members.get(worker_id)
        return None if member is None else member.slot

    @contextmanager
    def telling(self, listener: Callable[[], None]) -> Iterator[None]:
        """Have `listener` called whenever something about some worker has changed."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def submit(self, slot: int, request: Request, handler: DeltaHandler) -> Connection:
        """Send a request; from now on its deltas go to `handler`, until `finished`.

        Raises:
            WorkerLost: the connection has ended; the worker is not ready any more.
        """
        member = self.at(slot)
        if member.connection is None:
            raise WorkerLost(f"worker {member.instance.name}: the connection has ended; try another worker")
        try:
            member.connection.submit(request)
        except WorkerLost as error:
            self._on_lost(member, error)
            raise
        member.requests[request.request_id] = handler
        return member.connection

    def finished(self, slot: int, request_id: RequestId) -> None:
        """Deliver no more of this request."""
        member = self._by_slot[slot]
        if member is not None:
            member.requests.pop(request_id, None)
            self._close_if_idle(member)

    async def fetch_file(self, card: ModelCard, file: CardFile) -> bytes:
        """Fetch a card's file from any worker that has it.

        Raises:
            Unavailable: no worker answered.
        """
        holders = [m for m in self._members.values() if m.connection and file in m.instance.card.files]
        self._rng.shuffle(holders)
        problem: Exception | None = None
        for member in holders:
            if member.connection is None:
                continue  # lost meanwhile
            try:
                async with asyncio.timeout(FETCH_TIMEOUT_S):
                    return await member.connection.fetch(file.sha256)
            except (Unavailable, RequestError, TimeoutError) as error:
                problem = error
                _log.warning(
                    "file_fetch_failed", file=file.name, worker=member.instance.name, error=str(error)
                )
        raise Unavailable(
            f"model {card.name}: {file.name} could not be fetched from any of {len(holders)} connected workers that"
            f" list it; try again when one is back",
            retry_after_s=1.0,
        ) from problem

    def workers(self) -> list[WorkerView]:
        """Describe every worker known, in the order of their slots."""
        return [self._view(member) for member in self._by_slot if member is not None]

    def check(self) -> None:
        """Raise AssertionError where parts disagree."""
        self.tree.check()
        self.loads.check()
        for slot, member in enumerate(self._by_slot):
            pools = [name for name, pool in self.pools.items() if slot < len(pool.ready) and pool.ready[slot]]
            if member is None:
                assert not pools, f"free slot {slot} is ready for {pools}"
                assert not self.tree.held_blocks(slot), f"free slot {slot} holds blocks"
                continue
            assert self._members[member.worker_id] is member, f"slot {slot}: found by id"
            expected = [member.instance.card.name] if member.condition is Condition.READY else []
            assert pools == expected, f"{member.instance.name} is {member.condition} and ready for {pools}"
            if member.connection is None:
                assert not member.requests, f"{member.instance.name}: requests on no connection"
                assert not self.tree.held_blocks(slot), f"{member.instance.name} is lost but holds blocks"
            assert self.loads.open_requests(slot) == len(member.requests), (
                f"{member.instance.name}: {self.loads.open_requests(slot)} reserved, {len(member.requests)} requests"
            )

    # -- membership

    def _put(self, instance: Instance) -> None:
        member = self._members.get(instance.worker_id)
        if member is None:
            if not self._admit(instance):
                return
        else:
            previous, member.instance, member.listed = member.instance, instance, True
            if previous.card.name != instance.card.name:
                self._refresh(previous.card.name)
        self._refresh(instance.card.name)

    def _admit(self, instance: Instance) -> bool:
        """Give a new worker a slot and connect to it, if there is room."""
        if len(self._members) >= self._config.workers_max:
            self._left_out[instance.worker_id] = instance
            _log.warning("worker_left_out", worker=instance.name, workers_max=self._config.workers_max)
            return False
        slot = next((s for s, m in enumerate(self._by_slot) if m is None), len(self._by_slot))
        member = Member(instance, slot)
        if slot == len(self._by_slot):
            self._by_slot.append(member)
            self.tree.grow(slot + 1)
            self.loads.grow(slot + 1)
        self._by_slot[slot] = self._members[instance.worker_id] = member
        assert self._group is not None, "run() is under way"
        self._group.create_task(self._keep_connected(member), name=f"connection to {instance.name}")
        return True

    def _remove(self, worker_id: WorkerId, reason: str) -> None:
        self._left_out.pop(worker_id, None)
        member = self._members.get(worker_id)
        if member is None:
            return
        _log.info("worker_withdrawn", worker=member.instance.name, reason=reason)
        member.listed = False
        self._refresh(member.instance.card.name)
        self._close_if_idle(member)

    def _close_if_idle(self, member: Member) -> None:
        if not member.listed and not member.requests:
            member.closing.set()

    def _forget(self, member: Member) -> None:
        del self._members[member.worker_id]
        self._by_slot[member.slot] = None
        self._indexer.forget(member.slot)
        self.loads.reset(member.slot)
        self._refresh(member.instance.card.name)
        if self._left_out:
            self._put(self._left_out.pop(next(iter(self._left_out))))

    def _refresh(self, model: str) -> None:
        """Say anew which of a model's workers may get requests."""
        members = [m for m in self._members.values() if m.instance.card.name == model]
        if not members:
            self.pools.pop(model, None)
            self._note_conditions()
            return
        staying = [m for m in members if m.listed and m.instance.state is InstanceState.READY] or members
        pool = self.pools.get(model)
        if pool is None:
            pool = self.pools[model] = Pool(staying[0].instance.card)
        elif all(m.instance.card != pool.card for m in staying):
            alike = [m for m in staying if m.identity == identity(pool.card)]
            pool.card = (alike or staying)[0].instance.card
        pool.ready = np.zeros(len(self._by_slot), dtype=np.bool_)
        for member in members:
            member.matching = member.identity == identity(pool.card)
            pool.ready[member.slot] = member.condition is Condition.READY
        self._note_conditions()
        self._tell_news()

    def _note_conditions(self) -> None:
        counts = Counter(member.condition for member in self._members.values())
        for condition in Condition:
            self._metrics.workers.labels(condition).set(counts[condition])

    def _tell_news(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    # -- connections

    async def _keep_connected(self, member: Member) -> None:
        """Connect, and again whenever the connection is lost, for as long as the worker is listed."""
        loop = asyncio.get_running_loop()
        shortest_s, longest_s = self._config.reconnect_s_max / 100, self._config.reconnect_s_max
        pause_s = shortest_s
        was_lost = False  # of which `worker_lost` has told
        while member.listed:
            sink = _MemberSink(self, member)
            self.loads.reset(member.slot, total_blocks=member.instance.engine.total_blocks)
            try:
                async with asyncio.timeout(self._config.connect_timeout_s):
                    connection = await self._plane.connect(member.instance, sink)
            except (PenstockError, TimeoutError) as error:
                self._on_unreachable(member, error, was_lost=was_lost)
                was_lost = False
                if isinstance(error, ProtocolError):  # one of the two has to be replaced first
                    pause_s = longest_s
            else:
                connected_s = loop.time()
                was_lost = not sink.ended
                await self._hold(member, connection, sink)
                if loop.time() - connected_s > longest_s:
                    pause_s = shortest_s
            member.closing.clear()
            if member.listed:
                await self._wait_closing(member, pause_s * self._rng.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, longest_s)
        self._forget(member)

    async def _hold(self, member: Member, connection: Connection, sink: "_MemberSink") -> None:
        """Use a connection until it is lost or not needed any more."""
        try:
            if not sink.ended:
                self._on_connected(member, connection, sink)
                await member.closing.wait()
        finally:
            sink.ended = True
            self._detach(member, WorkerLost(f"worker {member.instance.name}: the connection was closed here"))
            await connection.close()

    async def _wait_closing(self, member: Member, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await member.closing.wait()
        except TimeoutError:
            pass

    def _on_connected(self, member: Member, connection: Connection, sink: "_MemberSink") -> None:
        member.connection = connection
        member.problem = None
        member.connections += 1
        member.subscriber = sink.subscriber = EventSubscriber(
            connection,
            apply=lambda _, events: self._indexer.apply(member.slot, events),
            replace=lambda _, events: self._indexer.replace(member.slot, events),
            rng=self._rng,
        )
        member.subscriber.start()
        _log.info("worker_connected", worker=member.instance.name, address=member.instance.address)
        self._refresh(member.instance.card.name)
        if not member.matching:
            _log.warning(
                "worker_mismatched",
                worker=member.instance.name,
                model=member.instance.card.name,
                block_size=member.instance.card.block_size,
                fix="its block size or salt differs from the model's other workers; it waits until they are gone",
            )

    def _on_unreachable(self, member: Member, error: Exception, *, was_lost: bool) -> None:
        problem = (
            error
            if isinstance(error, PenstockError)
            else WorkerLost(
                f"worker {member.instance.name}: no answer from {member.instance.address} within"
                f" {self._config.connect_timeout_s} s"
            )
        )
        self._metrics.connect_failures.inc()
        if member.problem is None or member.problem.message != problem.message:
            log = _log.debug if was_lost else _log.warning
            log("worker_unreachable", worker=member.instance.name, error=problem.message)
        member.problem = problem

    def _on_lost(self, member: Member, error: WorkerLost) -> None:
        if member.connection is None:
            return
        self._metrics.connections_lost.inc()
        log = _log.warning if member.condition is Condition.READY or member.requests else _log.info
        log("worker_lost", worker=member.instance.name, requests=len(member.requests), error=error.message)
        member.problem = error
        self._detach(member, error)
        member.closing.set()

    def _detach(self, member: Member, error: WorkerLost) -> None:
        """Forget what only the connection kept true, and end what ran on it."""
        if member.connection is None:
            return
        member.connection = None
        alone = len(member.requests) == 1 and self.loads.requests(member.slot) <= 1
        if member.subscriber is not None:
            member.subscriber.close()
        self._indexer.forget(member.slot)
        self.loads.reset(member.slot)
        self._refresh(member.instance.card.name)
        requests, member.requests = member.requests, {}
        for handler in requests.values():
            handler.on_lost(error, alone=alone)

    def _view(self, member: Member) -> WorkerView:
        instance, slot = member.instance, member.slot
        load, reserved = self.loads.load(slot), self.loads.reserved(slot)
        subscriber = member.subscriber
        return WorkerView(
            worker_id=member.worker_id,
            name=instance.name,
            model=instance.card.name,
            role=instance.role,
            state=instance.state,
            condition=member.condition,
            problem=None if member.problem is None else member.problem.message,
            address=instance.address,
            host=instance.host,
            pid=instance.pid,
            connections=member.connections,
            open_requests=len(member.requests),
            load=None if load is None else msgspec.structs.asdict(load),
            reserved_requests=reserved.requests,
            reserved_prefill_tokens=reserved.prefill_tokens,
            reserved_blocks=reserved.blocks,
            indexed_blocks=self.tree.held_blocks(slot),
            event_sequence=None if subscriber is None else subscriber.sequence,
            event_resyncs=0 if subscriber is None else subscriber.resyncs,
        )


class _MemberSink:
    """Takes what one connection brings; deaf once the connection is given up."""

    def __init__(self, fleet: Fleet, member: Member) -> None:
        self.ended = False
        self.subscriber: EventSubscriber | None = None
        self._fleet = fleet
        self._member = member

    def push(self, worker_id: WorkerId, deltas: Sequence[Delta]) -> None:  # noqa: ARG002 - one sink a worker
        if self.ended:
            return
        num_bytes = 0
        requests = self._member.requests
        for delta in deltas:
            handler = requests.get(delta.request_id)
            if handler is not None:
                num_bytes += len(delta.token_ids)
                handler.on_delta(delta)
        self._fleet._metrics.output_tokens.inc(num_bytes >> 2)

    def push_event(self, worker_id: WorkerId, message: EventMessage) -> None:  # noqa: ARG002
        if self.subscriber is not None and not self.ended:
            self.subscriber.push(message)

    def push_load(self, worker_id: WorkerId, load: WorkerLoad) -> None:  # noqa: ARG002
        if not self.ended:
            self._fleet.loads.report(self._member.slot, load)

    def lost(self, worker_id: WorkerId, error: WorkerLost) -> None:  # noqa: ARG002
        if not self.ended:
            self.ended = True
            self._fleet._on_lost(self._member, error)
