"""The load of one data-parallel rank of vLLM, from its statistics and the requests that it was given."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core.types.events import KvEvent
from penstock.core.types.load import WorkerLoad
from penstock.engine.vllm.requests import Running
from penstock.engine.vllm.tiers.stats import TierStats

_PREEMPTED = 3


@dataclass(slots=True)
class LoadCounts:
    """The requests of a rank, totals since the start, and its core's latest statistics: a report costs no walk over requests."""

    total_blocks: int = 0
    steps: int = 0
    preemptions: int = 0
    prefilled_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    kv_failures: int = 0
    """Prompts that were recomputed, as their KV did not come."""
    scheduled: int = 0
    """Requests in its batch after its latest step."""
    usage: float = 0.0
    """Share of its blocks in use, likewise."""
    cached_blocks: int = 0
    """From its KV events."""
    requests: int = 0
    """Those that have begun and not ended."""
    context_tokens: int = 0
    """Of those with output."""
    missing: int = 0
    """Prompt tokens to compute, of those without."""
    waiting: dict[str, float] = field(default_factory=dict)
    """Those without output: vLLM's id -> arrival, oldest first."""
    tiers: TierStats = field(default_factory=TierStats)

    def begin(self, vllm_id: str, running: Running) -> None:
        """Add a request that is sent to vLLM."""
        self.requests += 1
        self.missing += running.missing
        self.waiting[vllm_id] = running.arrived_s

    def count(self, running: Running, output: Any) -> None:
        """Count an output of a request, and note in `running` what it changes."""
        tokens = len(output.new_token_ids)
        self.generated_tokens += tokens
        running.num_tokens += tokens
        if running.has_output:
            self.context_tokens += tokens
        else:
            running.has_output = True
            self.context_tokens += running.num_tokens
            self.missing -= running.missing
            del self.waiting[output.request_id]
        if output.prefill_stats is not None:
            self.prefilled_tokens += output.prefill_stats.num_computed_tokens
            self.prefix_hit_tokens += output.prefill_stats.num_cached_tokens
        if output.events:
            self.preemptions += sum(event.type == _PREEMPTED for event in output.events)

    def end(self, vllm_id: str, running: Running) -> None:
        """Remove a request that has ended."""
        self.requests -= 1
        if running.has_output:
            self.context_tokens -= running.num_tokens
        else:
            self.missing -= running.missing
            del self.waiting[vllm_id]

    def stepped(self, stats: Any) -> Sequence[KvEvent]:
        """Note a step with vLLM's SchedulerStats, None without; give the KV events of tiers that come with them."""
        self.steps += 1
        if stats is None:
            return ()
        self.scheduled, self.usage = stats.num_running_reqs, stats.kv_cache_usage
        return self.tiers.read(stats.kv_connector_stats)

    def load(self, now_s: float) -> WorkerLoad:
        """Report the load. Requests sent since vLLM's latest step count as waiting.

        Blocks in use are from vLLM's latest step; prompt tokens to compute are what the router expected.
        """
        running = max(self.requests - len(self.waiting), min(self.scheduled, self.requests))
        return WorkerLoad(
            running_requests=running,
            waiting_requests=self.requests - running,
            active_blocks=round(self.usage * self.total_blocks) if self.requests else 0,
            total_blocks=self.total_blocks,
            cached_blocks=self.cached_blocks,
            queued_prefill_tokens=self.missing,
            context_tokens=self.context_tokens,
            steps=self.steps,
            preemptions=self.preemptions,
            prefilled_tokens=self.prefilled_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            generated_tokens=self.generated_tokens,
            oldest_wait_s=now_s - next(iter(self.waiting.values())) if self.waiting else 0.0,
            kv_failures=self.kv_failures,
            kv_tiers=self.tiers.counts,
            onboarded_tokens=self.tiers.hit_tokens,
        )
