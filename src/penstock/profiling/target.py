"""What a profile measures: cells of prefill and decode, and the interface of the targets that measure them."""

from dataclasses import dataclass
from typing import Protocol

from penstock.perf.profile import DecodePoint, PrefillPoint, decode_name, prefill_name

DECODE_STEPS = 16
"""Timed steps per measurement of a decode cell."""
SETTLING_STEPS = 2
"""Steps of the whole batch before the first timed one."""


@dataclass(frozen=True, slots=True)
class PrefillCell:
    """One step of `prompts` prompts, each of `new_tokens` after `cached_tokens` in the prefix cache."""

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
        """Prompt length that gives `context` in the middle of the timed steps."""
        return max(1, self.context - DECODE_STEPS // 2 - SETTLING_STEPS)

    @property
    def generated_tokens(self) -> int:
        """Output tokens per sequence, including those generated while waiting for the last sequence to start."""
        return DECODE_STEPS + SETTLING_STEPS + 2 + self.batch

    def __str__(self) -> str:
        return decode_name(self.batch, self.context)


Cell = PrefillCell | DecodeCell


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a target. None is unknown or unlimited.

    step_tokens:    most prompt tokens of one step; longer prompts take several steps
    block_size:     granularity of cached prefixes in tokens
    caches:         whether the target reports cached tokens
    batches_prompts: whether several prompts can run in one step
    """

    context_length: int | None = None
    step_tokens: int | None = None
    max_batch: int | None = None
    kv_tokens: int | None = None
    block_size: int = 16
    caches: bool = True
    batches_prompts: bool = True

    def refusal(self, cell: Cell) -> str | None:
        """Give the reason why a cell cannot be measured; None if it can."""
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
        """Give the reason why a prefill cell is more than one step; None if it is one."""
        if isinstance(cell, DecodeCell):
            return None
        if cell.prompts > 1 and not self.batches_prompts:
            return "prompts cannot be put into one step from outside"
        tokens = cell.new_tokens * cell.prompts
        if self.step_tokens is not None and tokens > self.step_tokens:
            return f"one step computes at most {self.step_tokens} tokens (max_batch_tokens)"
        return None


@dataclass(frozen=True, slots=True)
class Description:
    """Origin of a profile; fields as in `Profile`."""

    engine: str
    model: str
    engine_version: str
    hardware: str
    machine: str
    kv_bytes_per_token: float = 0.0
    kv_capacity_tokens: int = 0


class ProfileTarget(Protocol):
    """Runs one measurement at a time and is idle in between."""

    @property
    def limits(self) -> Limits: ...

    @property
    def description(self) -> Description: ...

    async def prefill(self, cell: PrefillCell) -> PrefillPoint:
        """Measure once from sending the prompts to the last first token; the point has the actual token counts.

        Raises:
            EngineError, Unavailable: it failed, in words of its own.
        """
        ...

    async def decode(self, cell: DecodeCell) -> DecodePoint:
        """Measure once the ITL while all sequences decode.

        Raises:
            EngineError, Unavailable: it failed, in words of its own.
        """
        ...
