"""What a planner decides by: demand, service and workers over some seconds."""

from dataclasses import dataclass, field

from penstock.core.types.instances import Role
from penstock.runtime.observations import Digest, GpuUse


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests of all frontends. Rates are per second of observed time."""

    arrivals_per_s: float = 0.0
    finished_per_s: float = 0.0
    failed_per_s: float = 0.0
    input_tokens: Digest = field(default_factory=Digest)
    output_tokens: Digest = field(default_factory=Digest)
    cached_share: float = 0.0
    """Share of input tokens that came from a prefix cache."""
    ttft_s: Digest = field(default_factory=Digest)
    itl_s: Digest = field(default_factory=Digest)
    queued: int = 0
    """Requests that wait in routers now."""
    oldest_queued_s: float = 0.0
    decode_ttft_s: Digest = field(default_factory=Digest)
    """Of `ttft_s`, those of requests that waited for decode workers."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker. Rates are means of the observed time, the rest is of its last window."""

    name: str
    role: Role
    ready_s: float
    step_s: Digest
    prefilled_tokens_per_s: float
    generated_tokens_per_s: float
    running_requests: int
    waiting_requests: int
    queued_prefill_tokens: int
    context_tokens: int
    kv_usage: float
    """Share of KV blocks that live requests hold, 0 to 1."""
    oldest_wait_s: float
    gpu: GpuUse | None = None
    """Its GPUs over the observed time; None without, or where NVML does not tell."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A deployment as seen at `at_s`, over the `seconds` before: fewer than asked for where it began later.

    `frontends` and `workers` are those that have sent a window lately; `silent` names the others that were seen before.
    """

    at_s: float
    seconds: float
    demand: Demand
    frontends: tuple[str, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    silent: tuple[str, ...] = ()

    def of(self, role: Role) -> tuple[WorkerView, ...]:
        """Give the workers of a role."""
        return tuple(worker for worker in self.workers if worker.role is role)
