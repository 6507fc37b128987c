"""Requests of the planner's benchmark: traces at a larger rate, and days made from a seed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from penstock.core.errors import ConfigError
from penstock.sim.trace import PREFIX_BLOCK_TOKENS, read_trace

_SMEAR_S = 5.0
"""Copies of a trace's row arrive within so many seconds of it: the swings of more seconds stay, those of single clients go."""
_DAY_S = 86_400.0

Curve = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by time: (requests,) seconds, prompt tokens, output tokens; `span_s` is when arrivals end.

    ids, id_ends: prefix ids of all prompts one after another, and (requests,) where each prompt's end; empty without ids
    """

    name: str
    at_s: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    span_s: float
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    id_ends: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def requests(self) -> int:
        return len(self.at_s)

    def prefix_ids(self, number: int) -> tuple[int, ...]:
        """Give the ids of a prompt's whole blocks of 512 tokens: equal leading ids are a shared prefix."""
        if not len(self.id_ends):
            return ()
        first = int(self.id_ends[number - 1]) if number else 0
        return tuple(self.ids[first : int(self.id_ends[number])].tolist())

    def reusable_tokens(self) -> np.ndarray:
        """Give the prompt tokens of each request that an endless cache of all workers would have: (requests,)."""
        found = np.zeros(self.requests, dtype=np.int64)
        seen: set[int] = set()
        for number in range(len(self.id_ends)):
            ids = self.prefix_ids(number)
            known = next((at for at, each in enumerate(ids) if each not in seen), len(ids))
            found[number] = min(known * PREFIX_BLOCK_TOKENS, int(self.input_tokens[number]) - 1)
            seen.update(ids)
        return found


def from_trace(path: Path, name: str, copies: float, *, seed: int = 1, tokens_max: int = 131_000) -> Workload:
    """Repeat each row of a trace `copies` times in the mean, a few seconds around its time.

    The first copies of all rows share prefixes as the rows do, and so do the second ones, but not the first with the second.

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
    copy = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    times = at_s[of] + random.uniform(-_SMEAR_S, _SMEAR_S, len(of))
    times = np.clip(np.abs(times), 0.0, span_s)
    inputs = np.minimum([max(1, row.input_tokens) for row in rows], tokens_max)
    outputs = np.array([max(1, row.output_tokens) for row in rows])
    load = _ordered(name, times, inputs[of], outputs[of], span_s)
    if not any(row.prefix_ids for row in rows):
        return load
    order = np.argsort(times, kind="stable")
    numbers: dict[int, int] = {}
    whole = [
        [numbers.setdefault(each, len(numbers)) for each in row.prefix_ids[: tokens // PREFIX_BLOCK_TOKENS]]
        for row, tokens in zip(rows, inputs.tolist(), strict=True)
    ]
    parts = [np.array(whole[of[at]], dtype=np.int64) + copy[at] * len(numbers) for at in order]
    return replace(load, ids=np.concatenate(parts), id_ends=np.cumsum([len(part) for part in parts]))


def steady(rate_per_s: float, span_s: float, *, seed: int) -> Workload:
    """Make Poisson arrivals at a constant rate."""
    return _made("steady", rate_per_s, span_s, np.ones_like, seed)


def diurnal(peak_per_s: float, *, seed: int, span_s: float = _DAY_S) -> Workload:
    """Make a day from 0.1 to 0.5 of the peak with six bursts, or a shorter one with steeper slopes and fewer bursts.

    A burst multiplies the rate of its time by five for ten minutes, after a rise of two minutes; its product is at most the peak.
    """
    bursts = max(1, round(6 * span_s / _DAY_S))
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


def alternating(
    peak_per_s: float, *, seed: int, span_s: float = _DAY_S, period_s: float = 3600.0
) -> Workload:
    """Make one rate of two kinds of requests whose shares swing between 5 and 95 %.

    Documents have about 4,000 tokens and short answers; chats have about 400 and answers of about 700.
    """
    made = _made("alternating", peak_per_s, span_s, np.ones_like, seed)
    random = np.random.default_rng([seed, 3])
    share = 0.5 + 0.45 * np.sin(2 * math.pi * made.at_s / period_s)
    is_document = random.random(made.requests) < share
    inputs = np.where(is_document, made.input_tokens * 4, made.input_tokens // 2)
    outputs = np.where(is_document, made.output_tokens // 3, made.output_tokens * 4)
    return replace(made, input_tokens=np.clip(inputs, 16, 32_000), output_tokens=np.clip(outputs, 1, 4_000))


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
