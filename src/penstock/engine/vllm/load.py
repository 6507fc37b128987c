"""The load of one data-parallel rank of vLLM, from its statistics and the requests that it was given."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core.types.events import KvEvent
from penstock.core.types.load import WorkerLoad
from penstock.engine.vllm.requests import Running
from penstock.engine.vllm.tiers.stats import TierStats

_PREEMPTED = 3


@dataclass(slots=True)
class LoadCounts:
    """Totals of a rank since the start, and its core's latest statistics."""

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
    tiers: TierStats = field(default_factory=TierStats)

    def count(self, running: Running, output: Any) -> None:
        """Count an output of a request, and note in `running` what it changes."""
        tokens = len(output.new_token_ids)
        self.generated_tokens += tokens
        running.num_tokens += tokens
        running.has_output = True
        running.missing = 0
        if output.prefill_stats is not None:
            self.prefilled_tokens += output.prefill_stats.num_computed_tokens
            self.prefix_hit_tokens += output.prefill_stats.num_cached_tokens
        self.preemptions += sum(event.type == _PREEMPTED for event in output.events or ())

    def stepped(self, stats: Any) -> Sequence[KvEvent]:
        """Note a step with vLLM's SchedulerStats, None without; give the KV events of tiers that come with them."""
        self.steps += 1
        if stats is None:
            return ()
        self.scheduled, self.usage = stats.num_running_reqs, stats.kv_cache_usage
        return self.tiers.read(stats.kv_connector_stats)

    def load(self, requests: Collection[Running], now_s: float) -> WorkerLoad:
        """Report the load. Requests sent since vLLM's latest step count as waiting.

        Blocks in use are from vLLM's latest step; prompt tokens to compute are what the router expected.
        """
        started = sum(each.has_output for each in requests)
        running = max(started, min(self.scheduled, len(requests)))
        waits = [now_s - each.arrived_s for each in requests if not each.has_output]
        return WorkerLoad(
            running_requests=running,
            waiting_requests=len(requests) - running,
            active_blocks=round(self.usage * self.total_blocks) if requests else 0,
            total_blocks=self.total_blocks,
            cached_blocks=self.cached_blocks,
            queued_prefill_tokens=sum(each.missing for each in requests),
            context_tokens=sum(each.num_tokens for each in requests if each.has_output),
            steps=self.steps,
            preemptions=self.preemptions,
            prefilled_tokens=self.prefilled_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            generated_tokens=self.generated_tokens,
            oldest_wait_s=max(waits, default=0.0),
            kv_failures=self.kv_failures,
            kv_tiers=self.tiers.counts,
            onboarded_tokens=self.tiers.hit_tokens,
        )
