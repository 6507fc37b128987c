"""Requests of the planner's benchmark: traces at a larger rate, and days made from a seed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.core.errors import ConfigError
from penstock.sim.workload.trace import read_trace

_SMEAR_S = 5.0
"""Copies of a trace's row arrive within so many seconds of it: the swings of more seconds stay, those of single clients go."""
_DAY_S = 86_400.0

Curve = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by time: (requests,) seconds, prompt tokens, output tokens; `span_s` is when arrivals end."""

    name: str
    at_s: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    span_s: float

    @property
    def requests(self) -> int:
        return len(self.at_s)

    def part(self, first: float, last: float) -> "Workload":
        """Give the requests between two shares of the time."""
        since_s, until_s = first * self.span_s, last * self.span_s
        chosen = (self.at_s >= since_s) & (self.at_s < until_s)
        return Workload(
            self.name,
            self.at_s[chosen] - since_s,
            self.input_tokens[chosen],
            self.output_tokens[chosen],
            until_s - since_s,
        )


def from_trace(path: Path, name: str, copies: float, *, seed: int = 1, tokens_max: int = 131_000) -> Workload:
    """Repeat each row of a trace `copies` times in the mean, a few seconds around its time.

    Raises:
        ConfigError: the file cannot be read, or is too short.
    """
    rows = read_trace(path)
    span_s = rows[-1].at_s
    if span_s < 600:
        raise ConfigError(f"{path}: spans {span_s:.0f} s, expected at least 600")
    random = np.random.default_rng(seed)
    at_s = np.array([row.at_s for row in rows])
    counts = np.floor(copies + random.random(len(rows))).astype(int)
    of = np.repeat(np.arange(len(rows)), counts)
    times = at_s[of] + random.uniform(-_SMEAR_S, _SMEAR_S, len(of))
    times = np.clip(np.abs(times), 0.0, span_s)
    inputs = np.array([max(1, row.input_tokens) for row in rows])[of]
    outputs = np.array([max(1, row.output_tokens) for row in rows])[of]
    return _ordered(name, times, np.minimum(inputs, tokens_max), outputs, span_s)


def steady(rate_per_s: float, span_s: float, *, seed: int) -> Workload:
    """Make Poisson arrivals at a constant rate."""
    return _made("steady", rate_per_s, span_s, np.ones_like, seed)


def diurnal(peak_per_s: float, *, seed: int, span_s: float = _DAY_S, bursts: int = 6) -> Workload:
    """Make a day from 0.1 to 0.5 of the peak, with bursts of five times the day's minimum on its slope.

    A burst multiplies the rate of its time by five for ten minutes, after a rise of two minutes; its product is at most the peak.
    """
    random = np.random.default_rng(seed)
    begins_s = np.sort(random.uniform(0.02, 0.97, bursts)) * span_s

    def curve(at_s: np.ndarray) -> np.ndarray:
        level = 0.3 - 0.2 * np.cos(2 * math.pi * at_s / span_s)
        factor = np.ones_like(at_s)
        for begin_s in begins_s:
            since_s = at_s - begin_s
            rise = np.clip(since_s / 120, 0, 1) * np.clip((720 - since_s) / 120, 0, 1)
            factor = np.maximum(factor, 1 + 4 * rise)
        product: np.ndarray = np.minimum(level * factor, 1.0)
        return product

    return _made("diurnal", peak_per_s, span_s, curve, seed)


def growing(peak_per_s: float, *, seed: int, span_s: float = _DAY_S) -> Workload:
    """Make a day of one rate whose prompts grow from a thousand to eight thousand tokens."""
    made = _made("growing", peak_per_s, span_s, np.ones_like, seed)
    growth = 1 + 7 * (made.at_s / span_s)
    inputs = np.clip(made.input_tokens * growth, 1, 32_000).astype(int)
    return Workload(made.name, made.at_s, inputs, made.output_tokens, span_s)


def _made(name: str, peak_per_s: float, span_s: float, curve: Curve, seed: int) -> Workload:
    """Thin Poisson arrivals at the peak by `curve`, 0 to 1; lengths are log-normal around 1,000 and 200 tokens."""
    random = np.random.default_rng([seed, 2])
    count = int(random.poisson(peak_per_s * span_s))
    at_s = random.uniform(0, span_s, count)
    at_s = at_s[random.random(count) < curve(at_s)]
    inputs = np.clip(random.lognormal(math.log(800), 0.67, len(at_s)), 16, 16_000).astype(int)
    outputs = np.clip(random.lognormal(math.log(150), 0.76, len(at_s)), 1, 1_500).astype(int)
    return _ordered(name, at_s, inputs, outputs, span_s)


def _ordered(name: str, at_s: np.ndarray, inputs: np.ndarray, outputs: np.ndarray, span_s: float) -> Workload:
    order = np.argsort(at_s, kind="stable")
    return Workload(name, at_s[order], inputs[order], outputs[order], span_s)
