"""The connector: one connection to each listed worker, and what arrives over it.

A worker whose connection ends gets no more requests, and its prefixes are forgotten at once. The connector tries again as long
as the worker is listed, and asks for its blocks anew over every new connection.
"""

import asyncio
import random
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from penstock.core.errors import PenstockError, ProtocolError, WorkerLost
from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types.events import SHARED_HOLDER, EventMessage, EventSnapshot, Holder, KvEvent
from penstock.core.types.instances import KvHolder
from penstock.core.types.load import KvRead, KvTierCounts, WorkerLoad
from penstock.core.types.requests import Delta, Prefetch, Request
from penstock.router.config import RouterConfig
from penstock.router.fleet.loads import LoadTracker
from penstock.router.fleet.member import Condition, EventFeeds, FleetMember
from penstock.router.indexer import Indexer
from penstock.router.metrics import RouterMetrics
from penstock.runtime.events.subscriber import EventSubscriber
from penstock.seams import Connection, RequestPlaneClient

_log = get_logger()


class IndexFeeds:
    """Makes subscribers that write into the index. One event loop owns it."""

    def __init__(self, indexer: Indexer, metrics: RouterMetrics, rng: random.Random) -> None:
        """Write into `indexer`, and count what is wrong with messages in `metrics`."""
        self._indexer = indexer
        self._metrics = metrics
        self._rng = rng

    def follow(
        self, member: FleetMember, feeds: EventFeeds, slot: int, holder: Holder = Holder.WORKER
    ) -> EventSubscriber:
        """Keep a slot of the index equal to what a holder keeps, as a member tells of it.

        Args:
            member: a connected worker.
            feeds: of its connection.
            slot: the holder's.
            holder: the member itself, or what it shares with others.
        """
        block_size = member.instance.card.block_size
        index = self._indexer.regions if member.instance.engine.is_deployment else self._indexer

        def apply(_: WorkerId, events: Sequence[KvEvent]) -> None:
            left_out = index.apply(slot, events, block_size)
            if left_out and subscriber.doubt():
                _log.warning(
                    "kv_events_left_out",
                    worker=member.instance.name,
                    holder=holder,
                    events=left_out,
                    block_size=block_size,
                    fix="they are of blocks of another size, or have hashes that are none; its content is asked for"
                    " anew. Should it go on (penstock_router_event_faults_total), update the older side",
                )

        def replace(_: WorkerId, part: EventSnapshot) -> None:
            index.replace(slot, part, block_size)

        subscriber = EventSubscriber(
            feeds.connection,
            apply=apply,
            replace=replace,
            on_fault=lambda fault: self._metrics.event_faults.labels(fault).inc(),
            rng=self._rng,
            holder=holder,
        )
        feeds.add(subscriber)
        return subscriber


_Key = tuple[Holder, str]


@dataclass(slots=True, eq=False)
class _Shared:
    """A holder with a slot.

    loaders: connected members that load from it, and their feeds; those that were connected first come first.
    off: those of them whose tier is off for now; what it holds does not count for them.
    teller: the one whose events are followed; None while the last one is lost and no other is there.
    """

    key: _Key
    slot: int
    loaders: dict[FleetMember, EventFeeds] = field(default_factory=dict)
    off: set[FleetMember] = field(default_factory=set)
    teller: FleetMember | None = None


class KvHolders:
    """Hosts and object stores whose KV workers share: one of the workers tells what each holds, and the index counts it for all of them.

    Each holder has a slot of the index, as a worker has. While the worker that tells of a holder is lost, the others go on loading
    from the holder, and what is known of it stays until another worker's snapshot replaces it. One event loop owns it.
    """

    def __init__(
        self,
        indexer: Indexer,
        feeds: IndexFeeds,
        *,
        take_slot: Callable[[], int],
        free_slot: Callable[[int], None],
    ) -> None:
        """Make it without holders.

        Args:
            indexer: keeps their blocks.
            feeds: follows the workers that tell them.
            take_slot: takes a slot of the index.
            free_slot: gives it back.
        """
        self._indexer = indexer
        self._feeds = feeds
        self._take_slot = take_slot
        self._free_slot = free_slot
        self._shared: dict[_Key, _Shared] = {}
        indexer.on_cleared = self._on_cleared

    def __len__(self) -> int:
        return len(self._shared)

    def holds(self, slot: int) -> bool:
        """Say whether a slot is a holder's."""
        return any(shared.slot == slot for shared in self._shared.values())

    def connected(self, member: FleetMember, feeds: EventFeeds) -> None:
        """Count what a member loads from for it, and follow what nobody tells yet."""
        for holder in _distinct(member.instance.engine.kv_holders):
            key = holder.kind, holder.id
            shared = self._shared.get(key)
            if shared is None:
                shared = self._shared[key] = _Shared(key, self._take_slot())
            self._indexer.expect(shared.slot, max(holder.blocks, self._indexer.expected(shared.slot)))
            shared.loaders[member] = feeds
            if shared.teller is None:
                self._choose_teller(shared)
        self._share(member)

    def lost(self, member: FleetMember) -> None:
        """Count nothing more for a member; what it told another one tells."""
        left = self._of(member)
        for shared in left:
            del shared.loaders[member]
            shared.off.discard(member)
            if shared.teller is member:
                shared.teller = None
                self._choose_teller(shared)
        self._share(member)
        for shared in left:
            if not shared.loaders:
                del self._shared[shared.key]
                self._indexer.leave(shared.slot)
                self._free_slot(shared.slot)

    def note_tiers(self, member: FleetMember, tiers: Sequence[KvTierCounts]) -> None:
        """Take from a member's report which of its tiers are off."""
        is_off = {
            SHARED_HOLDER[counts.tier]: counts.is_off for counts in tiers if counts.tier in SHARED_HOLDER
        }
        has_changed = False
        for shared in self._of(member):
            if is_off.get(shared.key[0], False) != (member in shared.off):
                shared.off ^= {member}
                has_changed = True
        if has_changed:
            self._share(member)

    def check(self) -> None:
        """Raise AssertionError where parts disagree."""
        slots = [shared.slot for shared in self._shared.values()]
        assert len(set(slots)) == len(slots), "holders: each has a slot of its own"
        for key, shared in self._shared.items():
            assert shared.key == key, f"{key}: found by its key"
            assert shared.loaders, f"{key}: nobody loads from it"
            assert shared.teller in shared.loaders, f"{key}: told by nobody who loads from it"
            assert shared.off <= shared.loaders.keys(), f"{key}: off for somebody who does not load from it"

    def _of(self, member: FleetMember) -> list[_Shared]:
        keys = {(holder.kind, holder.id) for holder in member.instance.engine.kv_holders}
        found = [self._shared[key] for key in sorted(keys) if key in self._shared]
        return [shared for shared in found if member in shared.loaders]

    def _share(self, member: FleetMember) -> None:
        """Have the index count for a member what its holders hold."""
        slots = [shared.slot for shared in self._of(member) if member not in shared.off]
        self._indexer.tree.share(member.slot, slots)

    def _choose_teller(self, shared: _Shared) -> None:
        """Follow a member that loads from a holder, best one that is not off."""
        if not shared.loaders:
            return
        shared.teller = min(shared.loaders, key=lambda member: member in shared.off)
        self._feeds.follow(shared.teller, shared.loaders[shared.teller], shared.slot, shared.key[0])

    def _on_cleared(self, slot: int) -> None:
        """Follow another member of a holder whose teller has forgotten what the others keep there."""
        for shared in self._shared.values():
            if shared.slot == slot and shared.teller is not None and len(shared.loaders) > 1:
                teller = shared.teller
                feeds = shared.loaders.pop(teller)
                feeds.remove(shared.key[0])
                self._choose_teller(shared)
                shared.loaders[teller] = feeds  # as the last one to be asked


def _distinct(holders: Sequence[KvHolder]) -> list[KvHolder]:
    """Take one holder of each kind: a worker's events name the kind alone."""
    return list({holder.kind: holder for holder in holders if holder.kind is not Holder.WORKER}.values())


class Connector:
    """Connects members of a fleet, and passes what they report to the index and the loads. One event loop owns it."""

    def __init__(
        self,
        plane: RequestPlaneClient,
        indexer: Indexer,
        loads: LoadTracker,
        *,
        take_slot: Callable[[], int],
        free_slot: Callable[[int], None],
        config: RouterConfig,
        metrics: RouterMetrics,
        rng: random.Random,
        on_change: Callable[[FleetMember], None],
        on_round_trip: Callable[[FleetMember], None],
        on_arrivals: Callable[[FleetMember, int], None],
        on_kv_reads: Callable[[FleetMember, Sequence[KvRead]], None],
    ) -> None:
        """Connect to no worker yet; `keep_connected` does.

        Args:
            plane: connects to workers.
            indexer: follows their blocks.
            loads: follows their load reports.
            take_slot: takes a slot of the index that is no worker's.
            free_slot: gives it back.
            config: timeouts and pauses.
            metrics: counts lost connections and failures.
            rng: for jitter.
            on_change: called when a member was connected or lost, and at the first failure to reach it.
            on_round_trip: called when a link has measured another time to its region and back.
            on_arrivals: called with the number of requests that other routers have sent to a member.
            on_kv_reads: called with the totals that a member has read of others' KV.
        """
        self._plane = plane
        self._indexer = indexer
        self._loads = loads
        self._feeds = IndexFeeds(indexer, metrics, rng)
        self.holders = KvHolders(indexer, self._feeds, take_slot=take_slot, free_slot=free_slot)
        self._config = config
        self._metrics = metrics
        self._rng = rng
        self._on_change = on_change
        self._on_round_trip = on_round_trip
        self._on_arrivals = on_arrivals
        self._on_kv_reads = on_kv_reads

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The loop that owns it, asked for once: asking takes a system call, half a microsecond."""
        return asyncio.get_running_loop()

    async def keep_connected(self, member: FleetMember) -> None:
        """Connect, and reconnect whenever the connection is lost, as long as the worker is listed."""
        loop = self._loop
        shortest_s, longest_s = self._config.reconnect_s_max / 100, self._config.reconnect_s_max
        pause_s = shortest_s
        was_lost = False  # as `worker_lost` has logged
        while member.listed:
            sink = MemberSink(self, member)
            self._loads.reset(member.slot, total_blocks=member.instance.engine.total_blocks)
            try:
                async with asyncio.timeout(self._config.connect_timeout_s):
                    connection = await self._plane.connect(member.instance, sink)
            except (PenstockError, TimeoutError) as error:
                self._on_unreachable(member, error, was_lost=was_lost)
                was_lost = False
                if isinstance(error, ProtocolError):  # retrying soon is in vain: the versions differ
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

    def submit(self, member: FleetMember, request: Request | Prefetch) -> Connection:
        """Send a request or a prefetch over the member's connection.

        Raises:
            WorkerLost: it has ended.
        """
        connection = member.connection
        if connection is None:
            raise WorkerLost(f"worker {member.instance.name}: the connection has ended; try another worker")
        try:
            if isinstance(request, Prefetch):
                connection.prefetch(request)
            else:
                connection.submit(request)
        except WorkerLost as error:
            self._on_lost(member, error)
            raise
        return connection

    async def _hold(self, member: FleetMember, connection: Connection, sink: "MemberSink") -> None:
        """Use a connection until it is lost or no longer needed."""
        try:
            if not sink.ended:
                self._on_connected(member, connection, sink)
                await member.closing.wait()
        finally:
            sink.ended = True
            closed = WorkerLost(f"worker {member.instance.name}: the connection was closed here")
            self._detach(member, closed)
            await connection.close()

    async def _wait_closing(self, member: FleetMember, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await member.closing.wait()
        except TimeoutError:
            pass

    def _on_connected(self, member: FleetMember, connection: Connection, sink: "MemberSink") -> None:
        member.connection = connection
        member.problem = None
        member.connections += 1
        if member.instance.engine.kv_events:
            feeds = member.feeds = sink.feeds = EventFeeds(connection)
            member.subscriber = self._feeds.follow(member, feeds, member.slot)
            self.holders.connected(member, feeds)
        _log.info("worker_connected", worker=member.instance.name, address=member.instance.address)
        self._on_change(member)
        if not member.matching:
            _log.warning(
                "worker_mismatched",
                worker=member.instance.name,
                model=member.instance.card.name,
                block_size=member.instance.card.block_size,
                fix="its block size or salt differs from the model's other workers; it waits until they are gone",
            )

    def _on_unreachable(self, member: FleetMember, error: Exception, *, was_lost: bool) -> None:
        problem = (
            error
            if isinstance(error, PenstockError)
            else WorkerLost(
                f"worker {member.instance.name}: no answer from {member.instance.address} within"
                f" {self._config.connect_timeout_s} s"
            )
        )
        self._metrics.connect_failures.labels(_failure(problem)).inc()
        if member.problem is None or member.problem.message != problem.message:
            log = _log.debug if was_lost else _log.warning
            log("worker_unreachable", worker=member.instance.name, error=problem.message)
        is_first = member.problem is None
        member.problem = problem
        if is_first:
            self._on_change(member)

    def _on_lost(self, member: FleetMember, error: WorkerLost) -> None:
        if member.connection is None:
            return
        self._metrics.connections_lost.inc()
        log = _log.warning if member.condition is Condition.READY or member.requests else _log.info
        reason = error.message.removesuffix("; try another worker")  # advice to clients; routers do it
        log("worker_lost", worker=member.instance.name, requests=len(member.requests), error=reason)
        member.problem = error
        self._detach(member, error)
        member.closing.set()

    def _on_load(self, member: FleetMember, load: WorkerLoad) -> None:
        arrivals = self._loads.report(member.slot, load)
        if arrivals:
            self._on_arrivals(member, arrivals)
        if load.kv_reads:
            self._on_kv_reads(member, load.kv_reads)
        if member.noted is Condition.PREFILL_ONLY:
            self._metrics.show_prefill_worker(member.instance.name, load.waiting_requests, load.oldest_wait_s)
        self._metrics.kv_tiers.show(member.instance.name, load.kv_tiers)
        self._metrics.refusals_by_workers.show(member.instance.name, load.refused_frontends)
        self._metrics.links.show(member.instance.name, load.link)
        if load.link is not None and load.link.round_trip_s != member.round_trip_s:
            member.round_trip_s = load.link.round_trip_s
            self._on_round_trip(member)
        self.holders.note_tiers(member, load.kv_tiers)

    def _detach(self, member: FleetMember, error: WorkerLost) -> None:
        """Forget the member's blocks and loads, and end the requests on its connection."""
        if member.connection is None:
            return
        member.connection = None
        alone = len(member.requests) == 1 and self._loads.requests(member.slot) <= 1
        if member.feeds is not None:
            member.feeds.close()
        self.holders.lost(member)
        self._indexer.forget(member.slot)
        self._loads.reset(member.slot)
        self._metrics.kv_tiers.forget(member.instance.name)
        self._metrics.refusals_by_workers.forget(member.instance.name)
        self._metrics.links.forget(member.instance.name)
        self._on_change(member)
        requests, member.requests = member.requests, {}
        for handler in requests.values():
            handler.on_lost(error, alone=alone)


def _failure(problem: PenstockError) -> str:
    """Name why a worker could not be reached, for the metric."""
    if isinstance(problem, ProtocolError):
        return "refused"
    return "tls" if isinstance(problem.__cause__, ssl.SSLError) else "unreachable"


class MemberSink:
    """A `seams.WorkerSink` of one connection; it ignores everything once the connection is given up."""

    def __init__(self, connector: Connector, member: FleetMember) -> None:
        self.ended = False
        self.feeds: EventFeeds | None = None
        self._connector = connector
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
        if num_bytes:
            self._connector._metrics.output_tokens.inc(num_bytes >> 2)

    def written(self, worker_id: WorkerId, tokens: int) -> None:  # noqa: ARG002
        self._connector._metrics.output_tokens.inc(tokens)

    def push_event(self, worker_id: WorkerId, message: EventMessage) -> None:  # noqa: ARG002
        if self.feeds is not None and not self.ended:
            self.feeds.push(message)

    def push_load(self, worker_id: WorkerId, load: WorkerLoad) -> None:  # noqa: ARG002
        if not self.ended:
            self._connector._on_load(self._member, load)

    def lost(self, worker_id: WorkerId, error: WorkerLost) -> None:  # noqa: ARG002
        if not self.ended:
            self.ended = True
            self._connector._on_lost(self._member, error)
