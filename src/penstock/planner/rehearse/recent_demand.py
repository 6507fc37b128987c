"""The requests of the last minutes, as far as observations tell: how many came in each interval, and how long they were."""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.types.instances import Role
from penstock.planner.estimate.expected_demand import ExpectedDemand
from penstock.planner.observe.observation import Observation
from penstock.runtime.observations.windows import Digest

_REQUESTS_MAX = 20_000


@dataclass(frozen=True, slots=True)
class RehearsedRequest:
    """A request of a simulation; `new_tokens` of its prompt are not cached."""

    at_s: float
    input_tokens: int
    new_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class _Interval:
    seconds: float
    arrivals_per_s: float
    input_tokens: Digest
    output_tokens: Digest


class RecentDemand:
    """Keeps the last `seconds`. One task owns it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._kept_s = 0.0
        self._intervals: deque[_Interval] = deque()

    @property
    def is_whole(self) -> bool:
        """Whether all of the time was seen."""
        return self._kept_s >= self._seconds

    def take(self, seen: Observation, seconds: float) -> None:
        """Take the observation of the last `seconds`."""
        demand = seen.demand
        self._intervals.append(
            _Interval(seconds, demand.arrivals_per_s, demand.input_tokens, demand.output_tokens)
        )
        self._kept_s += seconds
        while self._kept_s - self._intervals[0].seconds >= self._seconds:
            self._kept_s -= self._intervals.popleft().seconds

    def replay(self, expected: ExpectedDemand, rng: random.Random) -> list[RehearsedRequest]:
        """Give as many of these requests as make the expected work, in the order of their times; those that queue now come first, at once.

        Within an interval they come at random times, and their lengths are drawn from those that were seen in it.
        """
        return list(self._replay(expected, rng))[:_REQUESTS_MAX]

    def _replay(self, expected: ExpectedDemand, rng: random.Random) -> Iterator[RehearsedRequest]:
        seen = sum(each.arrivals_per_s * each.seconds for each in self._intervals)
        scale = self._scale(expected)
        inputs, outputs = expected.input_lengths, expected.output_lengths
        lengths = _Lengths(expected, inputs, outputs, rng)
        for _ in range(expected.queued):
            yield lengths.make(0.0)
        begin_s = owed = 0.0
        for each in self._intervals:
            rate_per_s = scale * each.arrivals_per_s if seen else expected.rate_per_s
            owed += rate_per_s * each.seconds
            count = round(owed)
            owed -= count
            lengths = _Lengths(
                expected,
                each.input_tokens if each.input_tokens.count else inputs,
                each.output_tokens if each.output_tokens.count else outputs,
                rng,
            )
            for at_s in sorted(rng.uniform(0.0, each.seconds) for _ in range(count)):
                yield lengths.make(begin_s + at_s)
            begin_s += each.seconds

    def _scale(self, expected: ExpectedDemand) -> float:
        """Give the expected work over what was seen, of the role where it is the most."""
        roles = list(expected.rates) or [Role.AGGREGATED]
        return max(self._work_of(role, expected) for role in roles)

    def _work_of(self, role: Role, expected: ExpectedDemand) -> float:
        """Give one role's expected over seen tokens: of prompts, of answers, or of both."""
        prompts, answers = role is not Role.DECODE, role is not Role.PREFILL
        seen = sum(
            each.arrivals_per_s
            * each.seconds
            * (
                prompts * (each.input_tokens.mean or expected.input_tokens)
                + answers * (each.output_tokens.mean or expected.output_tokens)
            )
            for each in self._intervals
        )
        tokens = prompts * expected.input_tokens + answers * expected.output_tokens
        return expected.rate_of(role) * self._kept_s * tokens / seen if seen else 0.0


class _Lengths:
    """Draws the lengths of requests from distributions; their means where these are empty."""

    def __init__(self, expected: ExpectedDemand, inputs: Digest, outputs: Digest, rng: random.Random) -> None:
        self._expected = expected
        self._draws = [_values(inputs, expected.input_tokens), _values(outputs, expected.output_tokens)]
        self._rng = rng

    def make(self, at_s: float) -> RehearsedRequest:
        tokens, output = (
            max(1, round(self._rng.choices(values, weights)[0])) for values, weights in self._draws
        )
        new = max(1, round(tokens * (1 - self._expected.cached_share)))
        return RehearsedRequest(at_s, tokens, new, output)


def _values(digest: Digest, mean: int) -> tuple[list[float], list[int]]:
    """Give the values of a distribution and how many there are of each."""
    if not digest.count:
        return [float(mean)], [1]
    pairs = sorted(digest.values())
    return [value for value, _ in pairs], [number for _, number in pairs]
