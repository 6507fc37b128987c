"""Settings of an engine's batch and queue."""

from typing import Any, Literal, Self

from pydantic import Field

from penstock.core.config import Config
from penstock.core.types.instances import Role
from penstock.kv.eviction import EvictionPolicy
from penstock.kv.retention import RetentionConfig

Order = Literal["fcfs", "shortest"]
AGEING = 0.03
"""Lowers the p90 TTFT from 3.9 s to 0.36 s in benchmarks/notes/prompt-order.md, and raises the p99 of long prompts from 7.2 s to 13.8 s."""


class SchedulerConfig(Config):
    """The bounds of an engine's batch and of its queue."""

    max_batch_tokens: int = Field(default=512, ge=1)
    """Tokens one step may compute. More makes prefill faster and lets running requests wait longer for it."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one prompt that one step may compute; None is all of `max_batch_tokens`. Fewer where a prompt runs on one
    of several data-parallel ranks."""
    max_running_requests: int = Field(default=64, ge=1)
    """Requests in the batch."""
    max_waiting_requests: int = Field(default=1024, ge=1)
    """Requests queued for the batch; beyond it new ones are refused."""
    order: Order | None = None
    """Order of prompts: `fcfs`, first come first served; `shortest`, fewest missing tokens first, less an ageing credit. None is fcfs for an aggregated worker, else shortest."""
    ageing: float = Field(default=AGEING, gt=0, le=1)
    """Ageing credit of `shortest`, in tokens per prompt token that the engine computes meanwhile. A prompt that lacks n tokens is overtaken only by prompts that arrive within the next n / ageing computed tokens."""
    eviction: EvictionPolicy = "seconds"
    """Which idle block a full device evicts first."""
    tenant_share: float = Field(default=1.0, gt=0, le=1)
    """Most of the device's blocks that one tenant's requests leave in the cache before its own go first."""
    prefetched_requests: int = Field(default=16, ge=0)
    """Next requests of the queue whose cached blocks are held, and loaded from lower tiers, before their turn comes; 0: none."""
    failed_steps_max: int = Field(default=3, ge=1)
    """Failed steps in a row after which the engine ends, unless one request was in all of them. The requests of each failed step migrate to other workers."""

    retention: RetentionConfig = RetentionConfig()
    """Bounds of the KV that operators pin and clients ask to keep."""

    @classmethod
    def of_ranks(
        cls, ranks: int, *, max_batch_tokens: int | None, max_running_requests: int | None, **others: Any
    ) -> Self:
        """Make the settings of an engine with several data-parallel ranks: batch limits times `ranks`.

        A prompt is computed on one rank, so a step computes no more of it than one rank's budget.

        Args:
            ranks: data-parallel ranks.
            max_batch_tokens: of each rank; None is the default.
            max_running_requests: of each rank; None is the default.
            others: further fields, for the engine as a whole.
        """
        each: dict[str, Any] = {
            "max_batch_tokens": max_batch_tokens,
            "max_running_requests": max_running_requests,
        }
        rank = cls(**others, **{name: value for name, value in each.items() if value is not None})
        return rank.model_copy(
            update={
                "max_batch_tokens": ranks * rank.max_batch_tokens,
                "max_prompt_tokens": rank.max_batch_tokens,
                "max_running_requests": ranks * rank.max_running_requests,
            }
        )

    def of_rank(self, ranks: int) -> Self:
        """Give the settings of one of the ranks that `of_ranks` made these for."""
        return self.model_copy(
            update={
                "max_batch_tokens": self.prompt_budget,
                "max_prompt_tokens": None,
                "max_running_requests": max(self.max_running_requests // ranks, 1),
            }
        )

    def is_shortest_first(self, role: Role) -> bool:
        """Say whether a worker of this role computes the shortest prompts first.

        Decode workers do: most of their requests arrive with KV and have almost no prompt tokens left, and should not wait
        behind prompts that the decode worker computes itself.
        """
        order = self.order or ("fcfs" if role is Role.AGGREGATED else "shortest")
        return order == "shortest"

    @property
    def prompt_budget(self) -> int:
        """Most tokens of one prompt in one step."""
        return self.max_prompt_tokens or self.max_batch_tokens

    def step_limits(self, turn_tokens: int | None) -> tuple[int, int]:
        """Give the most tokens of a step, and of one prompt in it.

        Args:
            turn_tokens: limit of one prompt while tenants take turns, since no prompt overtakes another within a step; None: they do not.
        """
        prompt = self.prompt_budget
        if turn_tokens is not None:
            prompt = min(prompt, max(turn_tokens, -(-2 * self.max_running_requests // self.prompts_at_once)))
        if prompt == self.prompt_budget:
            return self.max_batch_tokens, prompt
        return prompt * self.prompts_at_once, prompt

    @property
    def prompts_at_once(self) -> int:
        """Prompts that one step computes in parallel, each with its own `prompt_budget`."""
        return max(self.max_batch_tokens // self.prompt_budget, 1)
