"""Step times of one worker, remembered on a grid: a simulated day asks for them millions of times."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.planner.capacity import StepTimes
from penstock.runtime.observations import bucket_of

_TOKENS, _CACHED, _BATCH, _CONTEXT = 32, 1024, 2, 4096


@dataclass(slots=True)
class GridTimes:
    """A `StepTimes` of another one, at the middle of a cell: the same within a hundredth."""

    steps: StepTimes
    _mixed: dict[tuple[int, int, int, int, int], float] = field(default_factory=dict)
    _decode: dict[tuple[int, int], float] = field(default_factory=dict)
    _buckets: dict[float, int] = field(default_factory=dict)

    def bucket(self, step_s: float) -> int:
        """Give the digest's bucket of a step time of the grid."""
        found = self._buckets.get(step_s)
        if found is None:
            found = self._buckets[step_s] = bucket_of(step_s)
        return found

    @property
    def kv_capacity_tokens(self) -> int:
        return self.steps.kv_capacity_tokens

    def kv_held_tokens(self, tokens: float) -> float:
        return self.steps.kv_held_tokens(tokens)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Give the seconds of a decode step."""
        key = batch, context_tokens // _CONTEXT
        found = self._decode.get(key)
        if found is None:
            context = max(batch, key[1] * _CONTEXT + _CONTEXT // 2)
            found = self._decode[key] = self.steps.decode_step_s(batch, context)
        return found

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """Give the seconds of a step with prompts; several count as equal ones."""
        count = len(chunks)
        if count == 1:
            new, cached = chunks[0]
        else:
            new = sum(chunk[0] for chunk in chunks) // count
            cached = sum(chunk[1] for chunk in chunks) // count
        return self.prompts_s(count, new, cached, batch, context_tokens)

    def prompts_s(self, count: int, new: int, cached: int, batch: int, context_tokens: int) -> float:
        """Give the seconds of a step with `count` prompts of `new` tokens after `cached` ones."""
        key = count, new // _TOKENS, cached // _CACHED, batch // _BATCH, context_tokens // _CONTEXT
        found = self._mixed.get(key)
        if found is None:
            chunk = key[1] * _TOKENS + _TOKENS // 2, key[2] and key[2] * _CACHED + _CACHED // 2
            middle = key[3] * _BATCH + 1 if batch else 0
            context = max(middle, key[4] * _CONTEXT + _CONTEXT // 2) if batch else 0
            found = self._mixed[key] = self.steps.mixed_step_s([chunk] * count, middle, context)
        return found
