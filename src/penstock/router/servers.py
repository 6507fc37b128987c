"""The servers of the router alone: each is registered as a worker, whose connection carries load reports and KV events only."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import msgspec
import numpy as np

from penstock.core.errors import Overloaded, RequestError
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.events import EventMessage, Holder, KvEvent
from penstock.core.types.instances import EngineInfo, Instance, ModelCard, Role, WorkerChange
from penstock.core.types.kv import KvAction, KvExchange, KvReport
from penstock.core.types.load import PeerCount, TenantCount, WorkerLoad
from penstock.core.types.requests import ExpandedPrompt, MediaPrompt, Prefetch, Request
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.member import Condition, FleetWorkerView
from penstock.router.gateway import GatewayServer, ServerKvTransfer
from penstock.runtime.discovery.view import MemoryDiscovery, MemoryRegistration
from penstock.runtime.events.publisher import EventPublisher
from penstock.runtime.events.subscriber import EventFeed
from penstock.seams import Connection, DirectClient, DirectStream, WorkerSink


class ReportPlane:
    """A `seams.RequestPlaneClient` whose connections succeed at once."""

    def __init__(self) -> None:
        self._connections: dict[WorkerId, _ReportConnection] = {}

    async def connect(self, instance: Instance, sink: WorkerSink) -> Connection:
        connection = _ReportConnection(instance.worker_id, sink, self._connections)
        self._connections[instance.worker_id] = connection
        return connection

    def report(self, worker_id: WorkerId, load: WorkerLoad) -> None:
        """Report a server's load to the router, if it is connected."""
        connection = self._connections.get(worker_id)
        if connection is not None:
            connection.sink.push_load(worker_id, load)

    def publish(self, worker_id: WorkerId, events: Sequence[KvEvent]) -> None:
        """Tell the router of a server's KV events, if it is connected."""
        connection = self._connections.get(worker_id)
        if connection is not None:
            connection.publisher.publish(events)


class _ReportConnection:
    """One server's connection; an `EventOutlet` too, with the server's own feed and content."""

    writable = True

    def __init__(
        self, worker_id: WorkerId, sink: WorkerSink, connections: "dict[WorkerId, _ReportConnection]"
    ) -> None:
        self.worker_id = worker_id
        self.sink = sink
        self.publisher = EventPublisher()
        self._feed = EventFeed(self.publisher, self)
        self._connections = connections

    def send_event(self, message: EventMessage) -> None:
        self.sink.push_event(self.worker_id, message)

    def submit(self, request: Request) -> None:
        """Leave it to the gateway."""

    def prefetch(self, prefetch: Prefetch) -> None:
        """Leave it to the gateway."""

    def abort(self, request_id: RequestId) -> None:
        """Leave it to the gateway."""

    def grant(self, request_id: RequestId, tokens: int) -> None:
        """Leave it to the gateway."""

    def open_direct(self, request_id: RequestId, stream: DirectStream, client: DirectClient) -> bool:  # noqa: ARG002
        return False  # no deltas come

    def close_direct(self, request_id: RequestId) -> None:
        """None is open."""

    def subscribe(self, after_sequence: int | None, holder: Holder = Holder.WORKER) -> None:  # noqa: ARG002 - servers tell of themselves
        self._feed.subscribe(after_sequence)

    def unsubscribe(self, holder: Holder) -> None:
        """Nobody has subscribed to another holder."""

    async def fetch(self, sha256: str) -> bytes:
        raise RequestError(f"file {sha256}: nothing is fetched from servers of a gateway", http_status=404)

    async def change(self, change: WorkerChange | KvAction) -> KvReport | None:
        raise RequestError(
            f"{type(change).__name__}: servers of a gateway cannot be changed", http_status=409
        )

    async def expand_media(self, prompt: MediaPrompt) -> ExpandedPrompt:
        raise RequestError(
            f"{len(prompt.items)} media: nothing is expanded by servers of a gateway", http_status=409
        )

    async def count_tenants(self, counts: Mapping[str, TenantCount]) -> Mapping[str, PeerCount]:
        raise RequestError(f"{len(counts)} tenants: servers of a gateway do not count them", http_status=409)

    async def close(self) -> None:
        self._feed.close()
        if self._connections.get(self.worker_id) is self:
            del self._connections[self.worker_id]


ANY_LENGTH = int(np.iinfo(np.int32).max)
"""Context length of every model here: servers check lengths themselves."""
_BATCH_TOKENS = 8192  # a usual chunk of prefill
_NAMES_TOLD = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What a watcher of a server knows of it, beside what a gateway may say.

    Attributes:
        role: of a prefill and decode pair, or aggregated.
        kv_events: whether `Servers.publish` is called with its KV events.
        kv_transfer_kind: how it transfers KV; servers of one kind make a pair. None: it transfers none.
        make_transfer: of a prefill server, makes the fields of one transfer.
        transferred_prompts_only: whether decode servers of its kind compute no prompts.
    """

    role: Role = Role.AGGREGATED
    kv_events: bool = False
    kv_transfer_kind: str | None = None
    make_transfer: Callable[[], ServerKvTransfer] | None = None
    transferred_prompts_only: bool = False


@dataclass(frozen=True, slots=True)
class _Known:
    instance: Instance
    registration: MemoryRegistration
    watched: Watched | None


class Servers:
    """Registers servers in discovery, and reports what is learned of each. One event loop owns it."""

    def __init__(
        self,
        fleet: Fleet,
        plane: ReportPlane,
        discovery: MemoryDiscovery,
        *,
        servers_max: int,
        block_size: int,
    ) -> None:
        """Know none."""
        self._fleet = fleet
        self._plane = plane
        self._discovery = discovery
        self._servers_max = servers_max
        self._block_size = block_size
        self._known: dict[str, _Known] = {}
        self._numbers = count(1)
        self._changing = asyncio.Lock()  # one change at a time

    def worker_id(self, name: str) -> WorkerId | None:
        known = self._known.get(name)
        return None if known is None else known.instance.worker_id

    def transfer(self, name: str) -> ServerKvTransfer:
        """Make the fields of one KV transfer from a prefill server."""
        watched = self._known[name].watched
        assert watched is not None, "only watched servers are prefill servers"
        assert watched.make_transfer is not None, "a prefill server has it"
        return watched.make_transfer()

    async def put(self, name: str, server: GatewayServer, watched: Watched | None = None) -> FleetWorkerView:
        """Add or update a server, which is `watched` or described by a gateway.

        Another URL, model or role under the same name is another server.

        Raises:
            Overloaded: `servers_max` servers are known.
        """
        async with self._changing:
            known = self._known.get(name)
            if known is not None:
                present = known.instance
                same = (present.address, present.card.name, known.watched) == (
                    server.url,
                    server.model,
                    watched,
                )
                if not same:
                    await self._remove(name)
                    known = None
            if known is None:
                if len(self._fleet.workers()) >= self._servers_max:
                    raise Overloaded(
                        f"{self._servers_max} workers are known, the limit (router.workers_max); remove one first"
                    )
                instance = self._instance(WorkerId(next(self._numbers)), name, server, watched)
                registration = await self._discovery.register(instance)
            else:
                instance = self._instance(known.instance.worker_id, name, server, watched)
                registration = known.registration
                await registration.update(instance)
            self._known[name] = _Known(instance, registration, watched)
            return await self._shown(instance)

    async def remove(self, name: str) -> None:
        """Remove a server; its requests stay open until their feedback.

        Raises:
            RequestError: there is none of this name (404).
        """
        async with self._changing:
            await self._remove(name)

    def refuse_watched(self, name: str) -> None:
        """Raise RequestError (409) where a server of this name is watched: a gateway must not describe it."""
        known = self._known.get(name)
        if known is not None and known.watched is not None:
            raise RequestError(
                f"worker {name!r} is one of the servers named with --url, which the router watches; choose another name",
                http_status=409,
            )

    async def note_problem(self, name: str, problem: str | None) -> None:
        """Give a server no requests while it has a problem; None: it serves again. An unknown name is ignored."""
        async with self._changing:
            known = self._known.get(name)
            if known is not None:
                instance = msgspec.structs.replace(known.instance, problem=problem or "")
                await known.registration.update(instance)
                self._known[name] = _Known(instance, known.registration, known.watched)
                await self._shown(instance)

    def note_load(self, name: str, running: int, waiting: int, kv_usage: float | None) -> None:
        """Note a server's own word of its load. What exceeds this router's requests there is other clients'.

        Args:
            name: of the server; an unknown one is ignored.
            running: requests in its batch.
            waiting: requests in its queue.
            kv_usage: share of its KV cache in use, 0 to 1; None: unknown.
        """
        known = self._known.get(name)
        if known is None:
            return
        instance = known.instance
        slot = self._fleet.slot_of(instance.worker_id)
        ours = 0 if slot is None else self._fleet.loads.open_requests(slot)
        others = max(running + waiting - ours, 0)
        queued, total = min(others, waiting), instance.engine.total_blocks
        used = round(kv_usage * total) if others and kv_usage is not None else 0
        self._plane.report(
            instance.worker_id,
            WorkerLoad(
                running_requests=others - queued,
                waiting_requests=queued,
                active_blocks=used,
                total_blocks=total,
            ),
        )

    def publish(self, name: str, events: Sequence[KvEvent]) -> None:
        """Apply a watched server's KV events to the prefix index; an unknown name is ignored."""
        known = self._known.get(name)
        if known is not None:
            self._plane.publish(known.instance.worker_id, events)

    async def _remove(self, name: str) -> None:
        known = self._known.get(name)
        if known is None:
            names = sorted(self._known)
            told = ", ".join(names[:_NAMES_TOLD]) + ", ..." * (len(names) > _NAMES_TOLD) or "none"
            raise RequestError(f"worker {name!r} is not known; known: {told}", http_status=404)
        changed = asyncio.Event()
        try:
            await known.registration.close()
            with self._fleet.changes.telling(changed.set):
                while any(
                    view.worker_id == known.instance.worker_id
                    and view.condition in {Condition.READY, Condition.PREFILL_ONLY}
                    for view in self._fleet.workers()
                ):
                    changed.clear()
                    await changed.wait()
        finally:
            del self._known[name]  # last: until then requests may be routed to it

    def _instance(
        self, worker_id: WorkerId, name: str, server: GatewayServer, watched: Watched | None
    ) -> Instance:
        watched = watched or Watched()
        kind = watched.kv_transfer_kind
        return Instance(
            worker_id=worker_id,
            name=name,
            address=server.url,
            role=watched.role,
            card=card_of(server.model, self._block_size),
            engine=EngineInfo(
                block_size=self._block_size,
                total_blocks=server.total_blocks,
                context_length=ANY_LENGTH,
                max_batch_tokens=_BATCH_TOKENS,
                max_running_requests=ANY_LENGTH,
                kv_events=watched.kv_events,
                transferred_prompts_only=watched.transferred_prompts_only,
            ),
            state=server.state,
            prices=server.prices,
            adapters=server.adapters,
            host=server.host,
            rack=server.rack,
            zone=server.zone,
            region=server.region,
            exchange=None if kind is None else KvExchange.native(kind),
        )

    async def _shown(self, instance: Instance) -> FleetWorkerView:
        """Wait until the fleet has taken in a server."""
        changed = asyncio.Event()
        with self._fleet.changes.telling(changed.set):
            while True:
                slot = self._fleet.slot_of(instance.worker_id)
                if slot is not None and self._fleet.slots.at(slot).instance == instance:
                    (view,) = (view for view in self._fleet.workers() if view.worker_id == instance.worker_id)
                    if view.connections:
                        return view
                changed.clear()
                await changed.wait()


def card_of(model: str, block_size: int) -> ModelCard:
    """Make the card of a gateway's model: its name is the salt of its blocks."""
    return ModelCard(name=model, context_length=ANY_LENGTH, block_size=block_size, salt=model.encode())
