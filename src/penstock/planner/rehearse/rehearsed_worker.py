"""A worker of a rehearsal: computes prompts by chunks beside decode steps, many decode steps at once."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from penstock.planner.rehearse.recent_demand import RehearsedRequest
from penstock.planner.rehearse.step_prices import StepPrices


@dataclass(slots=True)
class Answer:
    """A request on its way; times are virtual seconds, NaN before they come.

    left:     prompt tokens to compute
    tokens:   output tokens to come when it begins to decode
    context:  tokens of its KV then
    """

    request: RehearsedRequest
    left: int
    tokens: int
    context: int
    first_s: float = math.nan
    last_s: float = math.nan


class RehearsedWorker:
    """Its clock goes step by step up to a given time. One task owns it."""

    def __init__(
        self,
        prices: StepPrices,
        *,
        max_batch_tokens: int,
        requests_max: int | None,
        kv_tokens: int,
        kv_held_tokens: Callable[[float], float],
        steps_max: int,
    ) -> None:
        """Make an idle worker.

        Args:
            prices: its step times.
            max_batch_tokens: most tokens of a step.
            requests_max: most requests that decode; None is as many as a step has tokens.
            kv_tokens: tokens that its KV holds.
            kv_held_tokens: tells of a request's tokens how many of these it takes.
            steps_max: it stands still after so many steps.
        """
        self._prices = prices
        self._max_batch_tokens = max_batch_tokens
        self._requests_max = requests_max or max_batch_tokens
        self._kv_tokens = kv_tokens
        self._kv_held_tokens = kv_held_tokens
        self._steps_left = steps_max
        self._now_s = 0.0
        self._waiting: deque[Answer] = deque()
        self._left = 0
        """Prompt tokens to compute."""
        self._decoded = 0
        """Tokens that a request which decodes from the beginning would have."""
        self._running: list[tuple[int, int, Answer]] = []
        """Requests that decode, as a heap by what `_decoded` is at their end."""
        self._context = 0
        """Tokens of these."""
        self._held = 0
        """KV that they will hold when they end, in the unit of `kv_tokens`."""
        self._numbers = count()

    @property
    def is_exhausted(self) -> bool:
        """Whether it stands still."""
        return not self._steps_left

    @property
    def backlog(self) -> tuple[int, int]:
        """(prompt tokens to compute, requests): the least is the best to send a request to."""
        return self._left, len(self._waiting) + len(self._running)

    def put(self, answer: Answer, at_s: float) -> None:
        """Take a request at `at_s`, to which the worker has advanced."""
        if not (self._waiting or self._running):
            self._now_s = max(self._now_s, at_s)
        self._waiting.append(answer)
        self._left += answer.left

    def advance(self, until_s: float) -> None:
        """Step until the clock is at `until_s` or later, or nothing is left to do."""
        while self._now_s < until_s and self._steps_left and (self._waiting or self._running):
            while self._waiting and not self._waiting[0].left and self._has_room(self._waiting[0]):
                self._join(self._waiting.popleft())  # its prompt was computed elsewhere
            self._step(until_s)
            self._steps_left -= 1

    def _has_room(self, answer: Answer) -> bool:
        if not self._running:
            return True
        fits = self._held + self._held_by(answer) <= self._kv_tokens
        return fits and len(self._running) < self._requests_max

    def _step(self, until_s: float) -> None:
        batch = len(self._running)
        head = self._waiting[0] if self._waiting else None
        if head is not None and head.left and self._has_room(head):
            chunk = min(head.left, max(1, self._max_batch_tokens - batch))
            self._now_s += self._prices.step_s(chunk, head.context - head.left, batch, self._context)
            head.left -= chunk
            self._left -= chunk
            self._decode(1)
            if not head.left:
                self._begin(self._waiting.popleft())
            return
        step_s = self._prices.step_s(0, 0, batch, self._context)
        steps = self._running[0][0] - self._decoded
        if not self._waiting:  # else they join once one ends
            steps = min(steps, max(1, math.ceil((until_s - self._now_s) / step_s)))
        self._now_s += steps * step_s
        self._decode(steps)

    def _begin(self, answer: Answer) -> None:
        """Note the first token of a request; the others follow."""
        answer.first_s = answer.last_s = self._now_s
        answer.tokens -= 1
        answer.context += 1
        if answer.tokens:
            self._join(answer)

    def _join(self, answer: Answer) -> None:
        heappush(self._running, (self._decoded + answer.tokens, next(self._numbers), answer))
        self._context += answer.context
        self._held += self._held_by(answer)

    def _held_by(self, answer: Answer) -> int:
        """Count what a request's KV takes at its end."""
        return math.ceil(self._kv_held_tokens(answer.context + answer.tokens))

    def _decode(self, steps: int) -> None:
        """Give each running request `steps` tokens; those that have all of theirs leave."""
        self._decoded += steps
        self._context += steps * len(self._running)
        while self._running and self._running[0][0] <= self._decoded:
            _, _, answer = heappop(self._running)
            self._context -= answer.context + answer.tokens
            self._held -= self._held_by(answer)
            answer.last_s = self._now_s
