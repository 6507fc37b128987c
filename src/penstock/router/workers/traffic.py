"""One model's recent traffic: request rate and mean answer length."""

import math
from dataclasses import dataclass

_RATE_WINDOW_S = 30.0
_LENGTH_WINDOW_S = 600.0
_FIRST_GUESS_TOKENS = 256.0


@dataclass(slots=True)
class Traffic:
    """Exponentially forgetting averages, on loop time. One event loop owns it.

    `mean_output_tokens` begins with a guess that weighs as much as one answer.
    """

    _arrivals: float = 0.0
    _arrivals_at_s: float = -math.inf
    _answers: float = 1.0
    _tokens: float = _FIRST_GUESS_TOKENS
    _ended_at_s: float = -math.inf

    @property
    def mean_output_tokens(self) -> float:
        return self._tokens / self._answers

    def arrived(self, now_s: float, requests: int = 1) -> None:
        """Count requests."""
        self._arrivals = self._arrivals * _kept(now_s - self._arrivals_at_s, _RATE_WINDOW_S) + requests
        self._arrivals_at_s = now_s

    def ended(self, output_tokens: int, now_s: float) -> None:
        """Count a completed answer."""
        kept = _kept(now_s - self._ended_at_s, _LENGTH_WINDOW_S) if self._ended_at_s > -math.inf else 1.0
        self._answers = self._answers * kept + 1.0
        self._tokens = self._tokens * kept + output_tokens
        self._ended_at_s = now_s

    def rate_per_s(self, now_s: float) -> float:
        """Give the request rate; too low in the first `_RATE_WINDOW_S`."""
        return self._arrivals * _kept(now_s - self._arrivals_at_s, _RATE_WINDOW_S) / _RATE_WINDOW_S

    def check(self) -> None:
        """Raise AssertionError where an average is none."""
        assert self._answers >= 1.0, f"answers: {self._answers}"
        assert self._arrivals >= 0.0, f"arrivals: {self._arrivals}"


def _kept(passed_s: float, window_s: float) -> float:
    return math.exp(-max(passed_s, 0.0) / window_s)
