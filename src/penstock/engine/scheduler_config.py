"""How much an engine takes on at once."""

from typing import Self

from pydantic import Field

from penstock.core.config import Config


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
    failed_steps_max: int = Field(default=3, ge=1)
    """Failed steps in a row after which the engine gives up; each ends the requests it was computing."""

    @classmethod
    def of_ranks(
        cls, ranks: int, *, max_batch_tokens: int | None, max_running_requests: int | None, **others: int
    ) -> Self:
        """Add up what the data-parallel ranks of one engine take on; None is the default, of each rank.

        A prompt is computed on one rank, so that one step takes no more of it than that rank's budget.
        """
        each = {"max_batch_tokens": max_batch_tokens, "max_running_requests": max_running_requests}
        rank = cls(**others, **{name: value for name, value in each.items() if value is not None})
        return rank.model_copy(
            update={
                "max_batch_tokens": ranks * rank.max_batch_tokens,
                "max_prompt_tokens": rank.max_batch_tokens,
                "max_running_requests": ranks * rank.max_running_requests,
            }
        )

    @property
    def prompt_budget(self) -> int:
        """Tokens of one prompt that one step may compute."""
        return self.max_prompt_tokens or self.max_batch_tokens

    @property
    def prompts_at_once(self) -> int:
        """Prompts that are computed beside each other, each with a budget of its own."""
        return max(self.max_batch_tokens // self.prompt_budget, 1)
