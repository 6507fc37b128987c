"""Settings of a worker process, whatever its engine."""

import pydantic

from penstock.core.config import Config
from penstock.runtime.config import EventConfig
from penstock.transfer.config import TransferConfig


class KvTransferConfig(Config):
    """How prefilled prompts go from worker to worker."""

    pin_ttl_s: float = pydantic.Field(default=30.0, gt=0)
    """How long a prefilled prompt's blocks are held for the worker that goes on; after that it computes them again."""
    pinned_share_max: float = pydantic.Field(default=0.5, gt=0, le=1)
    """The part of a worker's blocks that may be held so, or for prompts that are still being computed elsewhere; beyond it prompts go without their KV, or
    are fetched when they are done."""
    stream_kv: bool | None = None
    """Whether blocks move while their prompt is still being computed: true refuses an engine that cannot, null does it where the engine can."""
    fetches_max: int = pydantic.Field(default=1024, ge=1)
    """Requests of a worker that may wait for their KV, or for room for it; more are refused. Prompts that are still being computed elsewhere count too."""
    transfer: TransferConfig = pydantic.Field(default_factory=TransferConfig)
    """How blocks move."""


class WorkerConfig(Config):
    load_interval_s: float = pydantic.Field(default=0.05, gt=0)
    """Shortest time between two load reports; a worker that becomes busy or idle says so at once."""
    load_refresh_s: float = pydantic.Field(default=1.0, gt=0)
    """Longest time between two load reports of a busy worker; sooner where requests came, went on to decode or ended."""
    drain_notice_s: float = pydantic.Field(default=0.1, ge=0)
    """How long a draining worker still accepts requests, until every frontend knows."""
    drain_timeout_s: float = pydantic.Field(default=30.0, ge=0)
    """How long requests under way may go on once the worker drains; then they are handed to other workers."""
    kv_events: bool = True
    """Tell routers what the prefix cache holds, where the engine does; without, they guess it from what they sent."""
    events: EventConfig = pydantic.Field(default_factory=EventConfig)
    """What is kept of the KV events for those who follow them."""
    kv_transfer: KvTransferConfig = pydantic.Field(default_factory=KvTransferConfig)
    """Between prefill and decode workers."""
    own_cores: bool = False
    """Keep each worker's engine that computes on a CPU to a core of its own, and the deployment's other processes off the cores of decode
    workers, where they have others. Threads that compute are then not moved about; what else runs on their core makes them wait."""
    step_log: str | None = pydantic.Field(default=None, min_length=1)
    """Directory into which each worker writes when its engine's steps yielded tokens, a line a step in `NAME.steps.jsonl`; None: none."""
    step_log_bytes_max: int = pydantic.Field(default=256 << 20, ge=1)
    """Bytes of a worker's file there; further steps are not written."""
