"""What arrives at a router, as messages and as the bytes of the real codec; and the recording of it for a router alone."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import WorkerLost
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.events import EventBatch, EventMessage
from penstock.core.types.instances import Instance
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta, Request
from penstock.core.wire import HashArray
from penstock.runtime.requests.outbox import CODEC, Event, Load
from penstock.seams import Connection, RequestPlaneClient, WorkerSink


@dataclass(slots=True)
class Recording:
    """A router's input over some seconds.

    instances: the workers.
    snapshots: frames of each worker's whole content, as of the beginning.
    frames:    KV events and load reports since, in the order of arrival.
    prompts:   block hashes of prompts that were sent, (n, 2) uint64, and their tokens.
    shared:    (n,) hashes of prompts' common beginnings.
    """

    instances: list[Instance] = field(default_factory=list)
    snapshots: dict[WorkerId, list[bytes]] = field(default_factory=dict)
    frames: list[tuple[WorkerId, bytes]] = field(default_factory=list)
    prompts: list[tuple[HashArray, int]] = field(default_factory=list)
    shared: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    seconds: float = 0.0


@dataclass(slots=True)
class Meter:
    """Counts what arrives at one router while `is_on`, and records the frames."""

    is_on: bool = False
    event_messages: int = 0
    event_bytes: int = 0
    events: int = 0
    blocks: int = 0
    load_reports: int = 0
    load_bytes: int = 0
    frames: list[tuple[WorkerId, bytes]] = field(default_factory=list)
    sent: list[tuple[float, WorkerId, RequestId]] = field(default_factory=list)
    """When each request was sent, to which worker, and which."""

    def submitted(self, worker_id: WorkerId, request_id: RequestId) -> None:
        if self.is_on:
            self.sent.append((asyncio.get_running_loop().time(), worker_id, request_id))

    def event(self, worker_id: WorkerId, message: EventMessage) -> None:
        if not self.is_on:
            return
        frame = CODEC.encode(Event(message=message))
        self.event_messages += 1
        self.event_bytes += len(frame)
        if isinstance(message, EventBatch):
            self.events += len(message.events)
            self.blocks += sum(len(getattr(event, "block_hashes", b"")) >> 3 for event in message.events)
        self.frames.append((worker_id, frame))

    def load(self, worker_id: WorkerId, load: WorkerLoad) -> None:
        if not self.is_on:
            return
        frame = CODEC.encode(Load(load=load))
        self.load_reports += 1
        self.load_bytes += len(frame)
        self.frames.append((worker_id, frame))

    def rates(self, seconds: float) -> Mapping[str, float]:
        """Give what arrived a second."""
        return {
            "event_messages_per_s": self.event_messages / seconds,
            "events_per_s": self.events / seconds,
            "event_blocks_per_s": self.blocks / seconds,
            "load_reports_per_s": self.load_reports / seconds,
            "bytes_per_s": (self.event_bytes + self.load_bytes) / seconds,
        }


class MeteredPlane:
    """A request plane's client whose sinks tell a meter what arrives."""

    def __init__(self, plane: RequestPlaneClient, meter: Meter) -> None:
        """Wrap a host's plane."""
        self._plane = plane
        self._meter = meter

    async def connect(self, instance: Instance, sink: WorkerSink) -> Connection:
        connection = await self._plane.connect(instance, _MeteredSink(sink, self._meter))
        return _MeteredConnection(connection, self._meter)


class _MeteredConnection:
    """A connection whose requests are told; everything else is the connection's."""

    def __init__(self, connection: Connection, meter: Meter) -> None:
        self._connection = connection
        self._meter = meter

    def submit(self, request: Request) -> None:
        self._meter.submitted(self._connection.worker_id, request.request_id)
        self._connection.submit(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class _MeteredSink:
    def __init__(self, sink: WorkerSink, meter: Meter) -> None:
        self._sink = sink
        self._meter = meter

    def push(self, worker_id: WorkerId, deltas: Sequence[Delta]) -> None:
        self._sink.push(worker_id, deltas)

    def written(self, worker_id: WorkerId, tokens: int) -> None:
        self._sink.written(worker_id, tokens)

    def push_event(self, worker_id: WorkerId, message: EventMessage) -> None:
        self._meter.event(worker_id, message)
        self._sink.push_event(worker_id, message)

    def push_load(self, worker_id: WorkerId, load: WorkerLoad) -> None:
        self._meter.load(worker_id, load)
        self._sink.push_load(worker_id, load)

    def lost(self, worker_id: WorkerId, error: WorkerLost) -> None:
        self._sink.lost(worker_id, error)
