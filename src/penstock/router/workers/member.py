"""One worker as this frontend knows it: what discovery says, and what its connection says."""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from penstock.core.errors import PenstockError, WorkerLost
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.cards import ModelCard
from penstock.core.types.instances import Instance, InstanceState, Role
from penstock.core.types.kv_exchange import KvSource
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta
from penstock.router.workers.loads import Reserved
from penstock.router.workers.price_correction import PriceCorrection
from penstock.runtime.events.subscriber import EventSubscriber
from penstock.seams import Connection


class DeltaHandler(Protocol):
    """Who waits for one request's deltas. Sync, must not raise."""

    def on_delta(self, delta: Delta) -> None: ...

    def on_lost(self, error: WorkerLost, *, alone: bool) -> None:
        """The worker is gone; nothing more comes from it. `alone`: it had no other request, as far as is known."""
        ...


class Condition(StrEnum):
    """What may be done with a worker. Only a ready one gets new requests."""

    READY = "ready"
    DRAINING = "draining"
    CONNECTING = "connecting"  # never reached so far
    LOST = "lost"  # the connection ended or cannot be made again, whatever discovery says
    WITHDRAWN = "withdrawn"  # no longer in discovery; finishes what it has
    MISMATCHED = "mismatched"  # its blocks are named otherwise than those of the model's other workers
    PREFILL_ONLY = "prefill_only"  # never gets whole requests


CONDITIONS: tuple[Condition | None, ...] = (None, *Condition)
"""What the numbers in columns of conditions stand for; None where there is no worker."""


def identity(card: ModelCard) -> tuple[int, bytes]:
    """Say what block hashes depend on: workers that differ here cannot take each other's requests."""
    return card.block_size, card.salt


@dataclass(slots=True, eq=False)
class Member:
    """A worker's state. `requests` holds those sent and not ended; `closing` ends the present connection.

    `noted` is the condition that the fleet counts it under.
    """

    instance: Instance
    slot: int
    listed: bool = True
    matching: bool = True
    connection: Connection | None = None
    subscriber: EventSubscriber | None = None
    problem: PenstockError | None = None
    requests: dict[RequestId, DeltaHandler] = field(default_factory=dict)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    connections: int = 0
    noted: Condition | None = None
    price_correction: PriceCorrection = field(init=False)

    def __post_init__(self) -> None:
        self.price_correction = PriceCorrection(self.instance.prices)

    @property
    def worker_id(self) -> WorkerId:
        return self.instance.worker_id

    @property
    def identity(self) -> tuple[int, bytes]:
        return identity(self.instance.card)

    @property
    def is_predicted(self) -> bool:
        """Whether what the worker holds is guessed from what was sent there, as it sends no KV events."""
        return not self.instance.engine.kv_events

    @property
    def kv_source(self) -> KvSource:
        """How the worker's KV is read; empty where it offers none."""
        exchange = self.instance.exchange
        return KvSource() if exchange is None or exchange.source is None else exchange.source

    @property
    def condition(self) -> Condition:
        if self.connection is None:
            return Condition.LOST if self.connections else Condition.CONNECTING
        if not self.listed:
            return Condition.WITHDRAWN
        if self.instance.state is InstanceState.DRAINING:
            return Condition.DRAINING
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
    ) -> "WorkerView":
        """Say what people are told of it; the arguments are what others know of it."""
        instance, subscriber = self.instance, self.subscriber
        return WorkerView(
            worker_id=self.worker_id,
            name=instance.name,
            model=instance.card.name,
            role=instance.role,
            state=instance.state,
            condition=self.condition,
            problem=mismatch if self.problem is None else self.problem.message,
            kv_transfer_problem=kv_transfer_problem,
            address=instance.address,
            host=instance.host,
            rack=instance.rack,
            zone=instance.zone,
            region=instance.region,
            pid=instance.pid,
            connections=self.connections,
            open_requests=len(self.requests),
            load=None if load is None else msgspec.structs.asdict(load),
            reserved_requests=reserved.requests,
            reserved_prefill_tokens=reserved.prefill_tokens,
            reserved_blocks=reserved.blocks,
            indexed_blocks=indexed_blocks,
            predicted=predicted,
            adapters=instance.adapters,
            event_sequence=None if subscriber is None else subscriber.sequence,
            event_resyncs=0 if subscriber is None else subscriber.resyncs,
            price_factor=None if instance.prices is None else self.price_correction.factor,
            price_trusted=self.price_correction.trusted,
        )


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as `/admin/workers` shows it. `condition` says whether it gets requests, `problem` why not.

    `kv_transfer_problem` says why no prompt is handed over by it, as a prefill worker, or to it; None where that can be, or
    where there is no prefill worker.
    `load` is its own last report, None before the first; `reserved_*` is what this frontend sent since.
    `indexed_blocks` are what it is known to hold, or guessed to, if `predicted`. `event_sequence` is the last event batch applied, None before the first.
    `price_factor`: its steps were found to take so many times what it says, None where it says nothing; `price_trusted` is
    False where they are more than twice off even so.
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
    price_factor: float | None
    price_trusted: bool
