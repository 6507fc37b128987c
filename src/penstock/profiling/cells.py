"""What a sweep measures: cells of one step each, and the limits that decide which of them an engine can do."""

from dataclasses import dataclass

from penstock.perf.profile.profile import decode_name, prefill_name

DECODE_STEPS = 16
"""Timed in each measurement of a decode cell."""
SETTLING_STEPS = 2
"""Of the whole batch, before the first that is timed."""


@dataclass(frozen=True, slots=True)
class PrefillCell:
    """`prompts` prompts at once, each of `new_tokens` after `cached_tokens` that the prefix cache has."""

    new_tokens: int
    cached_tokens: int = 0
    prompts: int = 1

    def __str__(self) -> str:
        return prefill_name(self.new_tokens, self.cached_tokens, self.prompts)


@dataclass(frozen=True, slots=True)
class DecodeCell:
    """Steps of `batch` sequences with `context` tokens each."""

    batch: int
    context: int

    @property
    def prompt_tokens(self) -> int:
        """Give what leads to `context` in the middle of the steps that are timed."""
        return max(1, self.context - DECODE_STEPS // 2 - SETTLING_STEPS)

    @property
    def generated_tokens(self) -> int:
        """Give what each sequence has to generate, as those that begin first wait for the last one."""
        return DECODE_STEPS + SETTLING_STEPS + 2 + self.batch

    def __str__(self) -> str:
        return decode_name(self.batch, self.context)


Cell = PrefillCell | DecodeCell


@dataclass(frozen=True, slots=True)
class Limits:
    """What a target can do. None is unknown, or without a limit.

    step_tokens:    most prompt tokens that one step computes; longer prompts take several
    block_size:     cached prefixes are multiples of it
    caches:         whether a prefix cache shows which tokens it gave
    batches_prompts: whether several prompts can be put into one step
    """

    context_length: int | None = None
    step_tokens: int | None = None
    max_batch: int | None = None
    kv_tokens: int | None = None
    block_size: int = 16
    caches: bool = True
    batches_prompts: bool = True

    def refusal(self, cell: Cell) -> str | None:
        """Say why a cell cannot be measured."""
        if isinstance(cell, PrefillCell):
            batch, length = cell.prompts, cell.new_tokens + cell.cached_tokens + 1
        else:
            batch, length = cell.batch, cell.prompt_tokens + cell.generated_tokens
        if self.context_length is not None and length > self.context_length:
            return f"needs {length} tokens, the context length is {self.context_length}"
        if self.max_batch is not None and batch > self.max_batch:
            return f"the engine runs at most {self.max_batch} requests at once"
        if self.kv_tokens is not None and batch * (length + self.block_size) > self.kv_tokens:
            return (
                f"needs {batch * (length + self.block_size)} tokens of KV, there is room for {self.kv_tokens}"
            )
        return None

    def step_refusal(self, cell: Cell) -> str | None:
        """Say why a prefill cell is not one step."""
        if isinstance(cell, DecodeCell):
            return None
        if cell.prompts > 1 and not self.batches_prompts:
            return "prompts cannot be put into one step from outside"
        tokens = cell.new_tokens * cell.prompts
        if self.step_tokens is not None and tokens > self.step_tokens:
            return f"one step computes at most {self.step_tokens} tokens (max_batch_tokens)"
        return None
