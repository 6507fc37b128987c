"""Any latency model as that of one worker: corrected by a factor, with the worker's own KV."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.perf.model.parallel import Parallel


class StepTimes(Protocol):
    """The part of a latency model that capacity depends on."""

    @property
    def kv_capacity_tokens(self) -> int: ...

    def kv_held_tokens(self, tokens: float) -> float: ...

    def decode_step_s(self, batch: int, context_tokens: int) -> float: ...

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """A `PoolModel` of a profile, of linear prices or of a roofline. Immutable.

    steps:           step times of one worker
    parallel:        how its devices divide a step
    factor:          step times are so many times as long
    kv_tokens:       tokens of KV that the worker holds; None is the model's
    verified_tokens: tokens computed per decode step and sequence
    """

    steps: StepTimes
    parallel: Parallel = field(default_factory=Parallel)
    factor: float = 1.0
    kv_tokens: int | None = None
    verified_tokens: int = 1

    @property
    def kv_capacity_tokens(self) -> int:
        return self.steps.kv_capacity_tokens if self.kv_tokens is None else self.kv_tokens

    def kv_held_tokens(self, tokens: float) -> float:
        return self.steps.kv_held_tokens(tokens)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return self.factor * self.steps.decode_step_s(batch, context_tokens)

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        return self.factor * self.steps.mixed_step_s(chunks, batch, context_tokens)
