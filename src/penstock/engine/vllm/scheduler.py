"""vLLM's schedulers, which tell KV events with the messages of their steps. vLLM imports this in its engine core.

vLLM's own publisher has a thread and sockets of its own: they cost the core and the worker as much as the rest of a small step.
"""

from typing import Any

import msgspec
from vllm.distributed.kv_events import EventBatch, NullEventPublisher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from penstock.engine.vllm.events import KV_EVENTS

_ENCODER = msgspec.msgpack.Encoder()


class _StepEvents(NullEventPublisher):  # type: ignore[misc]
    """Keeps the events of the step under way."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[bytes] = []

    def publish(self, events: EventBatch) -> None:
        self.batches.append(_ENCODER.encode(events))


class TellingScheduler(Scheduler):  # type: ignore[misc]
    """A step's events go with its statistics, which vLLM sends to one client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_event_publisher = _StepEvents()

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        batches = self.kv_event_publisher.batches
        if batches and stats is not None:
            stats.kv_connector_stats = (stats.kv_connector_stats or {}) | {KV_EVENTS: batches}
            self.kv_event_publisher.batches = []
        return stats


class TellingAsyncScheduler(TellingScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same with vLLM's asynchronous scheduling."""
