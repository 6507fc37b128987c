"""The fleet: all workers as one frontend process sees them.

Discovery lists workers; a connection to each (`Connector`) says whether the worker is there. A change to one worker costs O(1), so
a thousand workers may come at once.
"""

import asyncio
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Protocol, assert_never

from penstock.core.errors import Overloaded, RequestError, Unavailable
from penstock.core.ids import RequestId, WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import (
    CardFile,
    Instance,
    InstancePut,
    InstanceRemoved,
    Location,
    ModelCard,
    WatchSynced,
)
from penstock.core.types.load import KvRead
from penstock.core.types.requests import ExpandedPrompt, MediaPrompt, Prefetch, Request
from penstock.core.wire import HashArray
from penstock.router.config import RouterConfig
from penstock.router.fleet.connector import Connector
from penstock.router.fleet.links import LinkBandwidths, path_to
from penstock.router.fleet.loads import LoadTracker
from penstock.router.fleet.member import Condition, DeltaHandler, FleetMember, FleetWorkerView
from penstock.router.fleet.slots import Ranks, WorkerSlots
from penstock.router.fleet.worker_pool import ModelPool
from penstock.router.indexer import Indexer
from penstock.router.metrics import RouterMetrics
from penstock.router.radix import PrefixMatch
from penstock.seams import Connection, Discovery, RequestPlaneClient

FETCH_TIMEOUT_S = 30.0

_log = get_logger()


async def fetch_file(
    card: ModelCard, file: CardFile, members: Iterable[FleetMember], rng: random.Random
) -> bytes:
    """Fetch a card's file from any member that has it.

    Args:
        card: of the model.
        file: one of its files.
        members: asked in random order, those that discovery lists no more at last.
        rng: for the order.

    Raises:
        Unavailable: no worker answered.
    """
    holders = [m for m in members if m.connection and file in m.instance.card.files]
    rng.shuffle(holders)
    holders.sort(key=lambda member: not member.listed)  # one whose lease ran out may be gone without a word
    problem: Exception | None = None
    for member in holders:
        if member.connection is None:
            continue  # lost meanwhile
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                return await member.connection.fetch(file.sha256)
        except (Unavailable, RequestError, TimeoutError) as error:
            problem = error
            _log.warning("file_fetch_failed", file=file.name, worker=member.instance.name, error=str(error))
    raise Unavailable(
        f"model {card.name}: {file.name} could not be fetched from any of {len(holders)} connected workers that"
        f" list it; try again when one is back",
        retry_after_s=1.0,
    ) from problem


EXPAND_TIMEOUT_S = 60.0
WORKERS_MAX = 3
"""Workers that are asked about one prompt."""
_EXPANDING = (Condition.READY, Condition.PREFILL_ONLY)


async def expand_media(
    card: ModelCard, prompt: MediaPrompt, members: Iterable[FleetMember]
) -> ExpandedPrompt:
    """Have a worker's engine expand the media of a prompt.

    The same media go to the same worker, as long as it is there, since engines keep what they have decoded.

    Args:
        card: of the model, or of an adapter.
        prompt: with one placeholder for each item.
        members: all workers.

    Raises:
        RequestError: the engine does not take these media.
        Unavailable: no worker answered.
    """
    name = card.parent or card.name
    asked = [
        member for member in members if member.condition in _EXPANDING and member.instance.card.name == name
    ]
    asked.sort(key=lambda member: _weight(prompt, member))
    problem: Exception | None = None
    for member in asked[:WORKERS_MAX]:
        if member.connection is None:
            continue  # lost meanwhile
        try:
            async with asyncio.timeout(EXPAND_TIMEOUT_S):
                return await member.connection.expand_media(prompt)
        except (Unavailable, Overloaded, TimeoutError) as error:
            problem = error
            _log.warning("media_expansion_failed", worker=member.instance.name, error=str(error))
    why = f": {problem or 'no answer in time'}" if asked else ""
    raise Unavailable(
        f"model {card.name}: none of {min(len(asked), WORKERS_MAX)} workers could read the request's media now{why}; send it"
        " again",
        retry_after_s=1.0,
    ) from problem


def _weight(prompt: MediaPrompt, member: FleetMember) -> bytes:
    """Order workers by a hash of worker and first item: a worker that leaves moves only its own items."""
    name = member.worker_id.to_bytes(8, "little", signed=False)
    return hashlib.blake2b(prompt.items[0].digest, key=name, digest_size=8).digest()


class ChangeNotifier:
    """The listeners of one kind of change. One event loop owns it."""

    def __init__(self) -> None:
        """Begin without listeners."""
        self._listeners: dict[Callable[[], None], None] = {}
        self._is_due = False

    @contextmanager
    def telling(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` in the loop's turn after a change, while the context is open."""
        assert listener not in self._listeners, "each listens once"
        self._listeners[listener] = None
        try:
            yield
        finally:
            del self._listeners[listener]

    def tell_soon(self) -> None:
        """Call all listeners in the loop's next turn."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._is_due = False
        for listener in tuple(self._listeners):
            listener()


_READY = frozenset({Condition.READY, Condition.PREFILL_ONLY})
_TIDY_UP_S = 10.0


class SlotFollower(Protocol):
    """Keeps something by worker slot, beside the fleet."""

    def grow(self, num_slots: int) -> None: ...

    def forget(self, slot: int) -> None: ...

    def moved(self, source: int, reader: int) -> None:
        """KV of the worker in slot `source` was read by the worker in slot `reader`."""


class Fleet:
    """Keeps members, prefix index and loads in step with the workers. One event loop owns it."""

    def __init__(
        self,
        discovery: Discovery,
        plane: RequestPlaneClient,
        *,
        config: RouterConfig,
        metrics: RouterMetrics,
        rng: random.Random,
    ) -> None:
        self._indexer = Indexer(config, metrics)
        self.tree, self.regions = self._indexer.tree, self._indexer.regions
        self.loads = LoadTracker()
        self.link_bandwidths = LinkBandwidths(config, self.loads.num_slots)
        self.slot_followers: list[SlotFollower] = []
        """Told of slots, and of KV that was read."""
        self.pools: dict[str, ModelPool] = {}
        """Pools by model; every pool has a worker."""
        self.slots = WorkerSlots()
        self._connector = Connector(
            plane,
            self._indexer,
            self.loads,
            take_slot=self._take_shared_slot,
            free_slot=self.slots.leave_shared,
            config=config,
            metrics=metrics,
            rng=rng,
            on_change=self._note_connection,
            on_round_trip=self._note_round_trip,
            on_arrivals=self._note_arrivals,
            on_kv_reads=self._note_kv_reads,
        )
        self._discovery = discovery
        self._config = config
        self._metrics = metrics
        self._rng = rng
        self._members: dict[WorkerId, FleetMember] = {}
        self.ranks = Ranks()
        self.changes = ChangeNotifier()
        """Told of every change of a worker."""
        self._models: Mapping[str, ModelCard] | None = None  # as of the last change
        self._left_out: dict[WorkerId, Instance] = {}
        self._counts = dict.fromkeys(Condition, 0)
        self._group: asyncio.TaskGroup | None = None
        self._synced = False
        for condition in Condition:
            metrics.workers.labels(condition).set(0)

    async def run(self) -> None:
        """Follow discovery, and keep a connection to each listed worker, until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            self._group.create_task(self._tidy_up(), name="tidy up")
            # Cancelling arrives inside the iterator, as the body never waits: it cleans up by itself.
            async for change in self._discovery.watch():
                match change:
                    case InstancePut(instance=instance):
                        for target in self.ranks.put(instance):
                            self._put(target)
                    case InstanceRemoved(worker_id=worker_id, reason=reason):
                        for each in self.ranks.remove(worker_id):
                            self._remove(each, reason)
                    case WatchSynced():
                        self._on_synced()
                    case _:
                        assert_never(change)

    def models(self) -> Mapping[str, ModelCard]:
        """Give the card of each model and adapter with a ready worker, by name; a model's name wins over an adapter's."""
        if self._models is None:
            models: dict[str, ModelCard] = {}
            for pool in self.pools.values():
                if pool.has_ready:
                    models.setdefault(pool.card.name, pool.card)
            for pool in self.pools.values():
                for name, card in pool.adapters.cards(pool.card).items():
                    models.setdefault(name, card)
            self._models = MappingProxyType(models)
        return self._models

    def expects(self, name: str) -> bool:
        """Say whether a listed worker that is not ready serves this model or adapter."""
        away = (m.instance for m in self._members.values() if m.listed and m.condition is not Condition.READY)
        return any(name == instance.card.name or name in instance.adapters for instance in away)

    @property
    def has_looked(self) -> bool:
        """Whether a connection to each worker that discovery lists was tried once."""
        return self._synced and all(
            m.connections or m.problem is not None for m in self._members.values() if m.listed
        )

    def has(self, target: Instance) -> bool:
        """Say whether a target was taken in as it is, and was connected."""
        member = self._members.get(target.worker_id)
        return member is not None and member.instance == target and member.connections > 0

    def slot_of(self, worker_id: WorkerId) -> int | None:
        member = self._members.get(worker_id)
        return None if member is None else member.slot

    def match(self, pool: ModelPool, hashes: HashArray) -> PrefixMatch:
        """Give what each worker holds of a prefix; for other regions what they tell of it, or was sent there lately.

        Args:
            pool: of the model.
            hashes: (n,) uint64, of full blocks.
        """
        match = self.tree.match(hashes)
        if not pool.has_deployments:
            return match
        return self.regions.deepened(match, hashes, pool.card.block_size, pool.deployments)

    def submit(self, slot: int, request: Request | Prefetch, handler: DeltaHandler) -> Connection:
        """Send a request or a prefetch; its deltas go to `handler` until `finished`.

        Raises:
            WorkerLost: the connection has ended.
        """
        member = self.slots.at(slot)
        connection = self._connector.submit(member, request)
        if isinstance(request, Request) and member.is_predicted:
            self._indexer.sent(slot, request.block_hashes)
        member.requests[request.request_id] = handler
        return connection

    def answered(self, slot: int, request: Request) -> None:
        """Guess that a worker also holds the blocks of its answer; `request` has the answer's tokens."""
        self._indexer.sent(slot, request.block_hashes)

    def finished(self, slot: int, request_id: RequestId) -> None:
        """Deliver no more of this request."""
        member = self.slots.get(slot)
        if member is not None:
            member.requests.pop(request_id, None)
            self._close_if_idle(member)

    async def fetch_file(self, card: ModelCard, file: CardFile) -> bytes:
        """Fetch a card's file from any worker that has it.

        Raises:
            Unavailable: no worker answered.
        """
        return await fetch_file(card, file, self._members.values(), self._rng)

    async def expand_media(self, card: ModelCard, prompt: MediaPrompt) -> ExpandedPrompt:
        """Have a worker of the model expand the media of a prompt; see the function `expand_media`."""
        return await expand_media(card, prompt, self._members.values())

    def workers(self) -> list[FleetWorkerView]:
        """Describe every worker, by slot."""
        return [self._view(member) for member in self.slots.now() if member is not None]

    def check(self) -> None:
        """Raise AssertionError where parts disagree."""
        self._indexer.check()
        self._connector.holders.check()
        self.loads.check()
        self.slots.check()
        self.link_bandwidths.check()
        for pool in self.pools.values():
            pool.check()
            assert len(pool.ready) == self.loads.num_slots == self.tree.num_slots, "as long as the loads"
        for slot, member in enumerate(self.slots.now()):
            pools = [
                name for name, pool in self.pools.items() if pool.ready[slot] or pool.ready_prefill[slot]
            ]
            if member is None:
                assert not pools, f"free slot {slot} is ready for {pools}"
                is_free = not self._connector.holders.holds(slot)
                assert not (is_free and self.tree.held_blocks(slot)), f"free slot {slot} holds blocks"
                continue
            assert self._members[member.worker_id] is member, f"slot {slot}: found by id"
            assert member.noted is member.condition, (
                f"{member.instance.name} is {member.condition}, noted as {member.noted}"
            )
            expected = [member.instance.card.name] if member.condition in _READY else []
            assert pools == expected, f"{member.instance.name} is {member.condition} and ready for {pools}"
            if member.connection is None:
                assert not member.requests, f"{member.instance.name}: requests on no connection"
                assert not self.tree.held_blocks(slot), f"{member.instance.name} is lost but holds blocks"
            assert self.loads.open_requests(slot) == len(member.requests), (
                f"{member.instance.name}: {self.loads.open_requests(slot)} reserved, {len(member.requests)} requests"
            )
        for condition, count in self._counts.items():
            members = [m for m in self._members.values() if m.condition is condition]
            assert len(members) == count, f"{count} are counted as {condition}, {len(members)} are"

    # -- membership

    def _on_synced(self) -> None:
        """Choose canonical cards by majority once discovery has listed every worker for the first time."""
        if not self._synced:
            self._synced = True
            for pool in self.pools.values():
                for changed in pool.choose_canonical():
                    self._note(changed)
        self._tell_soon()

    def _put(self, instance: Instance) -> None:
        member = self._members.get(instance.worker_id)
        if member is None:
            member = self._admit(instance)
            if member is None:
                return
        else:
            model = member.instance.card.name
            member.instance, member.listed = instance, True
            self.loads.resize(member.slot, instance.engine.total_blocks)
            if model != instance.card.name:
                self._leave_pool(member, model)
        self._settle(member)

    def _admit(self, instance: Instance) -> FleetMember | None:
        """Give a new worker a slot and connect to it; None past `workers_max`."""
        if len(self._members) >= self._config.workers_max:
            self._left_out[instance.worker_id] = instance
            _log.warning("worker_left_out", worker=instance.name, workers_max=self._config.workers_max)
            return None
        member = FleetMember(instance, self._take_slot())
        self._members[instance.worker_id] = member
        self.slots.put(member)
        assert self._group is not None, "run() is under way"
        self._group.create_task(self._keep(member), name=f"connection to {instance.name}")
        return member

    def _take_slot(self) -> int:
        slot = self.slots.next_slot()
        if slot >= self.loads.num_slots:
            num_slots = max(slot + 1, min(2 * self.loads.num_slots, self._config.workers_max))
            self.tree.grow(num_slots)
            self.loads.grow(num_slots)
            self.link_bandwidths.grow(num_slots)
            self.slots.grow(num_slots)
            for pool in self.pools.values():
                pool.grow(num_slots)
            for follower in self.slot_followers:
                follower.grow(num_slots)
        return slot

    def _take_shared_slot(self) -> int:
        """Take a slot for a host or an object store that workers share."""
        slot = self._take_slot()
        self.slots.put_shared(slot)
        return slot

    async def _keep(self, member: FleetMember) -> None:
        await self._connector.keep_connected(member)
        self._forget(member)

    def _remove(self, worker_id: WorkerId, reason: str) -> None:
        self._left_out.pop(worker_id, None)
        member = self._members.get(worker_id)
        if member is None:
            return
        _log.info("worker_withdrawn", worker=member.instance.name, reason=reason)
        member.listed = False
        self._settle(member)
        self._close_if_idle(member)

    def _close_if_idle(self, member: FleetMember) -> None:
        if not member.listed and not member.requests:
            member.closing.set()

    def _forget(self, member: FleetMember) -> None:
        del self._members[member.worker_id]
        self._indexer.leave(member.slot)
        self.loads.reset(member.slot)
        self.link_bandwidths.forget(member.slot)
        for follower in self.slot_followers:
            follower.forget(member.slot)
        self._leave_pool(member, member.instance.card.name)
        self._recount(member, None)
        self.slots.leave(member)
        if self._left_out:
            self._put(self._left_out.pop(next(iter(self._left_out))))

    # -- what may be done with each

    def _settle(self, member: FleetMember) -> None:
        """Take what discovery says about a worker."""
        model = member.instance.card.name
        pool = self.pools.get(model)
        if pool is None:
            pool = self.pools[model] = ModelPool(member, self.loads.num_slots, self._config.adapters_max)
        engine = member.instance.engine
        self._indexer.expect(member.slot, engine.total_blocks + engine.lower_tier_blocks)
        self.link_bandwidths.put(member.slot, Location.of(member.instance))
        for changed in pool.put(member, path_to(member.instance, self._config, member.round_trip_s)):
            self._note(changed)
        self._tell_soon()

    def _leave_pool(self, member: FleetMember, model: str) -> None:
        pool = self.pools[model]
        for changed in pool.remove(member):
            self._note(changed)
        if not len(pool):
            del self.pools[model]
        self._tell_soon()

    def _note(self, member: FleetMember) -> None:
        """Note whether a worker may get requests."""
        condition = member.condition
        pool = self.pools[member.instance.card.name]
        pool.set_ready(member.slot, is_ready=condition in _READY)
        if condition is not member.noted:
            self._recount(member, condition)
            self._tell_soon()

    def _note_connection(self, member: FleetMember) -> None:
        """Note that a worker was connected or lost, or could not be reached."""
        self._note(member)
        self._tell_soon()

    def _note_round_trip(self, member: FleetMember) -> None:
        """Price the way to another region as its link has measured it."""
        path = path_to(member.instance, self._config, member.round_trip_s)
        self.pools[member.instance.card.name].prices.move(member.slot, path)

    async def _tidy_up(self) -> None:
        """Forget what is old, and choose canonical cards anew where no worker answers."""
        while True:
            await asyncio.sleep(_TIDY_UP_S)
            now_s = asyncio.get_running_loop().time()
            self.link_bandwidths.forget_unused(now_s)
            for pool in self.pools.values():
                for changed in pool.choose_canonical_if_unanswered(now_s, self._config.no_worker_wait_s):
                    self._note(changed)

    def _note_arrivals(self, member: FleetMember, requests: int) -> None:
        """Count requests that other routers have sent."""
        now_s = asyncio.get_running_loop().time()
        self.pools[member.instance.card.name].traffic.arrived(now_s, requests)

    def _note_kv_reads(self, member: FleetMember, reads: Sequence[KvRead]) -> None:
        """Take what a worker has read of others' KV."""
        now_s = asyncio.get_running_loop().time()
        for read in reads:
            source = self.slot_of(read.prefill_worker)
            if source is not None:
                self.link_bandwidths.report(source, member.slot, read, now_s)
                for follower in self.slot_followers:
                    follower.moved(source, member.slot)

    def _recount(self, member: FleetMember, condition: Condition | None) -> None:
        for changed, by in ((member.noted, -1), (condition, +1)):
            if changed is not None:
                self._counts[changed] += by
                self._metrics.workers.labels(changed).set(self._counts[changed])
        if member.noted is Condition.PREFILL_ONLY:
            self._metrics.forget_prefill_worker(member.instance.name)
        member.noted = condition
        self.slots.note(member, condition)

    def _tell_soon(self) -> None:
        self._models = None
        self.changes.tell_soon()

    def _view(self, member: FleetMember) -> FleetWorkerView:
        slot, pool = member.slot, self.pools[member.instance.card.name]
        return member.view(
            self.loads.load(slot),
            self.loads.reserved(slot),
            indexed_blocks=self.tree.held_blocks(slot),
            predicted=member.is_predicted,
            mismatch=pool.mismatch(member),
            kv_transfer_problem=pool.pairs.problem(slot),
        )
