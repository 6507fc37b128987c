"""The load of a vLLM engine, from its statistics and the requests that it was given."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from penstock.core.types.load import WorkerLoad
from penstock.engine.vllm.requests import Running

_PREEMPTED = 3


@dataclass(slots=True)
class LoadCounts:
    """Totals since the start, and the core's latest statistics."""

    block_size: int = 1
    total_blocks: int = 0
    num_ranks: int = 1
    steps: int = 0
    preemptions: int = 0
    prefilled_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    by_rank: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By data-parallel rank, (requests in its batch, share of its blocks in use) after its latest step."""
    cached_blocks: int = 0
    """From its KV events."""

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

    def stepped(self, stats: Any, rank: int = 0) -> None:
        """Note a step of a data-parallel rank with vLLM's SchedulerStats."""
        self.steps += 1
        if stats is not None:
            self.by_rank[rank] = stats.num_running_reqs, stats.kv_cache_usage

    def load(self, requests: Collection[Running], now_s: float) -> WorkerLoad:
        """Report the load. Requests sent since vLLM's latest step count as waiting.

        Blocks in use are from vLLM's latest step; prompt tokens to compute are what the router expected.
        """
        started = sum(each.has_output for each in requests)
        scheduled = sum(count for count, _ in self.by_rank.values())
        usage = sum(share for _, share in self.by_rank.values()) / self.num_ranks
        running = max(started, min(scheduled, len(requests)))
        waits = [now_s - each.arrived_s for each in requests if not each.has_output]
        return WorkerLoad(
            running_requests=running,
            waiting_requests=len(requests) - running,
            active_blocks=round(usage * self.total_blocks) if requests else 0,
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
        )
