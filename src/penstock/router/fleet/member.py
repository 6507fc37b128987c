"""One worker as this frontend knows it, from discovery and from its connection."""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from penstock.core.errors import PenstockError, WorkerLost
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.events import EventMessage, Holder
from penstock.core.types.instances import Instance, InstanceState, ModelCard, Role
from penstock.core.types.kv import KvAccess
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta
from penstock.router.fleet.loads import Reserved
from penstock.runtime.events.subscriber import EventSubscriber
from penstock.seams import Connection


class EventFeeds:
    """The subscribers of one connection, by holder; passes each message to the subscriber that asked for it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._subscribers: dict[Holder, EventSubscriber] = {}

    def add(self, subscriber: EventSubscriber) -> None:
        """Subscribe."""
        self._subscribers[subscriber.holder] = subscriber
        subscriber.start()

    def remove(self, holder: Holder) -> None:
        """Unsubscribe; what still arrives is ignored."""
        subscriber = self._subscribers.pop(holder, None)
        if subscriber is not None:
            subscriber.close()
            self.connection.unsubscribe(holder)

    def push(self, message: EventMessage) -> None:
        subscriber = self._subscribers.get(message.holder)
        if subscriber is not None:
            subscriber.push(message)

    def close(self) -> None:
        """End with the connection."""
        for subscriber in self._subscribers.values():
            subscriber.close()
        self._subscribers.clear()


class DeltaHandler(Protocol):
    """Receives one request's deltas. Its methods must not raise."""

    def on_delta(self, delta: Delta) -> None: ...

    def on_lost(self, error: WorkerLost, *, alone: bool) -> None:
        """Note that the worker is lost. `alone`: as far as is known, it had no other request."""
        ...


class Condition(StrEnum):
    """What a worker may get. Only a ready worker gets new requests."""

    READY = "ready"
    DRAINING = "draining"
    ASLEEP = "asleep"  # its engine has given up its memory
    CONNECTING = "connecting"  # never reached so far
    LOST = "lost"  # the connection ended
    WITHDRAWN = "withdrawn"  # no longer in discovery; finishes what it has
    MISMATCHED = "mismatched"  # its card has other block hashes than the canonical model card
    PREFILL_ONLY = "prefill_only"  # a ready prefill worker
    UNHEALTHY = "unhealthy"  # its engine cannot serve for now


CONDITIONS: tuple[Condition | None, ...] = (None, *Condition)
"""Conditions by their number in columns; None for a free slot."""


def identity(card: ModelCard) -> tuple[int, bytes]:
    """Give what block hashes depend on; workers that differ here cannot share requests."""
    return card.block_size, card.salt


@dataclass(slots=True, eq=False)
class FleetMember:
    """A worker's state.

    matching: whether its card has the block hashes of the canonical model card
    feeds:    KV events of the present connection; `subscriber` is the one of its own blocks
    requests: sent and not ended
    closing:  ends the present connection
    noted:    the condition under which the fleet counts it
    round_trip_s: of a link, the time to its region and back as it has measured it; 0: not yet
    answers:  those that got beyond their first steps here, continuations included
    """

    instance: Instance
    slot: int
    listed: bool = True
    matching: bool = True
    connection: Connection | None = None
    subscriber: EventSubscriber | None = None
    feeds: EventFeeds | None = None
    problem: PenstockError | None = None
    requests: dict[RequestId, DeltaHandler] = field(default_factory=dict)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    connections: int = 0
    noted: Condition | None = None
    round_trip_s: float = 0.0
    answers: int = 0

    @property
    def worker_id(self) -> WorkerId:
        return self.instance.worker_id

    @property
    def identity(self) -> tuple[int, bytes]:
        return identity(self.instance.card)

    @property
    def is_predicted(self) -> bool:
        """Whether what the worker holds is guessed from what was sent there: it sends no KV events, or those of a region's hottest prefixes."""
        return not self.instance.engine.kv_events or self.instance.engine.is_deployment

    @property
    def kv_source(self) -> KvAccess:
        """How the worker's KV is read; empty where it offers none."""
        exchange = self.instance.exchange
        return KvAccess() if exchange is None or exchange.source is None else exchange.source

    @property
    def condition(self) -> Condition:
        if self.connection is None:
            return Condition.LOST if self.connections else Condition.CONNECTING
        if not self.listed:
            return Condition.WITHDRAWN
        if self.instance.state is not InstanceState.READY:
            return Condition(self.instance.state)
        if self.instance.problem:
            return Condition.UNHEALTHY
        if not self.matching:
            return Condition.MISMATCHED
        return Condition.PREFILL_ONLY if self.instance.role is Role.PREFILL else Condition.READY

    def view(
        self,
        load: WorkerLoad | None,
        reserved: Reserved,
        *,
        indexed_blocks: int,
        predicted: bool,
        mismatch: str | None,
        kv_transfer_problem: str | None,
    ) -> "FleetWorkerView":
        """Describe it for people; the arguments are known elsewhere."""
        instance, subscriber = self.instance, self.subscriber
        return FleetWorkerView(
            worker_id=self.worker_id,
            name=instance.name,
            model=instance.card.name,
            role=instance.role,
            state=instance.state,
            condition=self.condition,
            problem=(mismatch or instance.problem or None) if self.problem is None else self.problem.message,
            kv_transfer_problem=kv_transfer_problem,
            address=instance.address,
            host=instance.host,
            rack=instance.rack,
            zone=instance.zone,
            region=instance.region,
            pid=instance.pid,
            connections=self.connections,
            open_requests=len(self.requests),
            load=None if load is None else _shown(load),
            reserved_requests=reserved.requests,
            reserved_prefill_tokens=reserved.prefill_tokens,
            reserved_blocks=reserved.blocks,
            indexed_blocks=indexed_blocks,
            predicted=predicted,
            adapters=instance.adapters,
            event_sequence=None if subscriber is None else subscriber.sequence,
            event_resyncs=0 if subscriber is None else subscriber.resyncs,
        )


def _shown(load: WorkerLoad) -> dict[str, Any]:
    """Give all fields of a load, also those that are 0, which messages leave out."""
    tiers = [msgspec.structs.asdict(counts) for counts in load.kv_tiers]
    link = None if load.link is None else msgspec.structs.asdict(load.link)
    return {**msgspec.structs.asdict(load), "kv_tiers": tiers, "link": link}


class FleetWorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as `/admin/workers` shows it.

    problem:                why it gets no requests; None where it does
    kv_transfer_problem:    why it transfers KV with no other worker; None where it can, or without prefill workers
    load:                   its last report; None before the first
    reserved_*:             sent by this frontend since that report
    indexed_blocks:         blocks that it holds, as the index knows, or guesses where `predicted`
    event_sequence:         the last event batch applied; None before the first
    """

    worker_id: int
    name: str
    model: str
    role: Role
    state: InstanceState
    condition: Condition
    problem: str | None
    kv_transfer_problem: str | None
    address: str
    host: str
    rack: str
    zone: str
    region: str
    pid: int
    connections: int
    open_requests: int
    load: dict[str, Any] | None
    reserved_requests: int
    reserved_prefill_tokens: int
    reserved_blocks: int
    indexed_blocks: int
    predicted: bool
    adapters: tuple[str, ...]
    event_sequence: int | None
    event_resyncs: int
