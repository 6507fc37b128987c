"""Settings of a worker process with any engine."""

import pydantic

from penstock.core.config import Config
from penstock.runtime.config import EventConfig
from penstock.transfer.config import TransferConfig


class KvTransferConfig(Config):
    """How KV moves from prefill to decode workers."""

    pin_ttl_s: float = pydantic.Field(default=30.0, gt=0)
    """Time that a prefill worker keeps a prompt's blocks pinned for the decode worker; after that the decode worker recomputes them."""
    pinned_share_max: float = pydantic.Field(default=0.5, gt=0, le=1)
    """Share of a worker's blocks that KV transfers may pin or reserve. Beyond it a prefill worker exports no KV, and a decode worker reads KV only once its
    request has arrived."""
    stream_kv: bool | None = None
    """Whether blocks move while their prompt is still being computed. true: refuse an engine that cannot; null: if the engine can."""
    checksum: bool = True
    """Compare the CRC-32C of all KV that is read with its prefill worker's; what differs is computed. Not done in GPU memory."""
    fetches_max: int = pydantic.Field(default=1024, ge=1)
    """Requests of a decode worker that may wait for KV or for free blocks, including prompts still being computed by prefill workers; more are refused."""
    transfer: TransferConfig = pydantic.Field(default_factory=TransferConfig)
    """Transports and limits of the transfer agent."""


class WorkerConfig(Config):
    load_interval_s: float = pydantic.Field(default=0.05, gt=0)
    """Shortest time between two load reports; a worker that becomes busy or idle reports at once."""
    load_refresh_s: float = pydantic.Field(default=1.0, gt=0)
    """Longest time between two load reports of a busy worker; sooner if requests arrived, began to decode or ended."""
    drain_notice_s: float = pydantic.Field(default=0.1, ge=0)
    """Time that a draining worker still accepts requests, so that every frontend learns of it first."""
    drain_timeout_s: float = pydantic.Field(default=30.0, ge=0)
    """Time that running requests of a draining worker may take to finish; then they migrate to other workers."""
    kv_events: bool = True
    """Send KV events to routers, if the engine emits them; without, routers predict the prefix cache from the requests they sent."""
    events: EventConfig = pydantic.Field(default_factory=EventConfig)
    """Bounds of the KV event log."""
    kv_transfer: KvTransferConfig = pydantic.Field(default_factory=KvTransferConfig)
    """Between prefill and decode workers."""
    own_cores: bool = False
    """Pin each worker's engine that computes on a CPU to its own core, and keep the deployment's other processes off the cores of decode
    workers if other cores are free. Compute threads then stay on one core, but wait for whatever else runs there."""
    step_log: str | None = pydantic.Field(default=None, min_length=1)
    """Directory for step logs: each worker writes a line per step that yielded tokens to `NAME.steps.jsonl`. None: no logs."""
    step_log_bytes_max: int = pydantic.Field(default=256 << 20, ge=1)
    """Size limit of a worker's step log; further steps are not written."""
