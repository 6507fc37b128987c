"""How much an engine takes on at once."""

from typing import Any, Literal, Self

from pydantic import Field

from penstock.core.config import Config
from penstock.core.types.instances import Role

Order = Literal["fcfs", "shortest"]
AGEING = 0.03
"""Nine tenths of first tokens soonest, long prompts not much later than in turn: docs/decisions/0029."""


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
    """Whose prompt is computed next: `fcfs`, who came first; `shortest`, who lacks the fewest tokens, less what waiting has earned. None is fcfs for an aggregated worker, else shortest."""
    ageing: float = Field(default=AGEING, gt=0, le=1)
    """For `shortest`: tokens that waiting earns a prompt for each that the engine computes of any. One that lacks n is overtaken by those that come while n / ageing are computed, and by none that come later."""
    failed_steps_max: int = Field(default=3, ge=1)
    """Failed steps in a row after which the engine gives up, unless one request was in all of them; each hands the requests it was computing to other workers."""

    @classmethod
    def of_ranks(
        cls, ranks: int, *, max_batch_tokens: int | None, max_running_requests: int | None, **others: Any
    ) -> Self:
        """Add up what the data-parallel ranks of one engine take on; None is the default, of each rank.

        A prompt is computed on one rank, so that one step takes no more of it than that rank's budget.
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

    def order_of(self, role: Role) -> Order:
        """Say whose prompt a worker of this role computes next.

        To a decode worker most requests come with their prompt computed, and lack next to nothing: they do not wait behind
        those that it computes itself.
        """
        return self.order or ("fcfs" if role is Role.AGGREGATED else "shortest")

    def is_shortest_first(self, role: Role) -> bool:
        """Say whether a worker of this role computes the shortest prompts first."""
        return self.order_of(role) == "shortest"

    @property
    def prompt_budget(self) -> int:
        """Tokens of one prompt that one step may compute."""
        return self.max_prompt_tokens or self.max_batch_tokens

    @property
    def prompts_at_once(self) -> int:
        """Prompts that are computed beside each other, each with a budget of its own."""
        return max(self.max_batch_tokens // self.prompt_budget, 1)
