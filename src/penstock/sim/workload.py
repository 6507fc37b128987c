"""What users ask, and when: from a trace, or made up from a few numbers and a seed."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.sim.prompt import Prompt, named, named_units
from penstock.sim.trace import PREFIX_BLOCK_TOKENS, TraceRow

_SHARED_UNIT_TOKENS = 16
_RATE_MAX = 1e6


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: `input_tokens` is the whole prompt, the conversation so far included."""

    input_tokens: int
    output_tokens: int
    think_s: float = 0.0
    """How long after the end of the turn before it is sent."""


@dataclass(frozen=True, slots=True)
class Session:
    """One user: turns one after the other, each a longer part of the same stream of tokens."""

    at_s: float
    turns: tuple[Turn, ...]
    prompt: Prompt


class WorkloadConfig(Config):
    """A made-up workload. Lengths and gaps are means; a seed draws the rest."""

    requests: int = Field(default=1000, ge=1, le=10_000_000)
    """All turns of all sessions together, rounded up to whole sessions."""
    rate_per_s: float = Field(gt=0, le=_RATE_MAX)
    """Sessions that begin each second."""
    burstiness: float = Field(default=1.0, gt=0, le=1000)
    """Variance of the gaps between sessions over their squared mean: 1 is Poisson, more comes in bursts (Gamma)."""
    input_tokens: int = Field(default=1024, ge=1, le=10_000_000)
    """New prompt tokens of each turn, the shared prefix not counted."""
    output_tokens: int = Field(default=256, ge=1, le=1_000_000)
    """Tokens of each answer."""
    spread: float = Field(default=0.0, ge=0, le=3)
    """Standard deviation of the lengths' logarithm; 0 makes all equal."""
    turns: int = Field(default=1, ge=1, le=1000)
    """Requests of one conversation."""
    think_s: float = Field(default=10.0, ge=0)
    """Mean time between an answer's end and the next turn, exponential."""
    shared_prefix_tokens: int = Field(default=0, ge=0, le=1_000_000)
    """Prompt tokens that all sessions of a group begin with."""
    prefix_groups: int = Field(default=1, ge=1, le=1_000_000)
    """Groups, equally likely."""


def make_sessions(config: WorkloadConfig, rng: random.Random) -> Iterator[Session]:
    """Make a workload up, in order of time."""
    at_s = 0.0
    shape = 1.0 / config.burstiness
    unit = _SHARED_UNIT_TOKENS
    prefix_tokens = config.shared_prefix_tokens // unit * unit
    groups: dict[int, np.ndarray] = {}
    run = rng.getrandbits(62)
    for number in range(math.ceil(config.requests / config.turns)):
        group = rng.randrange(config.prefix_groups)
        if prefix_tokens and group not in groups:
            groups[group] = named_units(named(run, 1, group), prefix_tokens // unit)
        own = named(run, 2, number)
        prompt = Prompt(own, groups[group], unit) if prefix_tokens else Prompt(own)
        yield Session(at_s, tuple(_make_turns(config, rng)), prompt)
        at_s += rng.gammavariate(shape, 1.0 / (shape * config.rate_per_s))


def trace_sessions(
    rows: Sequence[TraceRow], *, seed: int, hit_ratio: float = 0.0, prefix_groups: int = 32
) -> Iterator[Session]:
    """Make each row of a trace a session of one turn.

    Args:
        rows: in order of time.
        seed: names what requests do not share.
        hit_ratio: for rows that do not tell their prefix: the share of prompt tokens that an infinite cache
            would have, by giving each prompt so much of one of `prefix_groups` common streams.
        prefix_groups: how many.

    Raises:
        ConfigError: a ratio that is none.
    """
    if not 0 <= hit_ratio < 1:
        raise ConfigError(f"hit ratio: must be >= 0 and < 1, got {hit_ratio:g}")
    rng = random.Random(seed)
    run = rng.getrandbits(62)
    unit = _SHARED_UNIT_TOKENS
    longest = max((row.input_tokens for row in rows), default=0)
    groups = [
        named_units(named(run, 1, g), math.ceil(longest * hit_ratio / unit) + 1)
        for g in range(prefix_groups if hit_ratio else 0)
    ]
    for number, row in enumerate(rows):
        own = named(run, 2, number)
        if row.prefix_ids:
            whole = row.prefix_ids[: row.input_tokens // PREFIX_BLOCK_TOKENS + 1]
            prompt = Prompt(own, np.array(whole, dtype=np.uint64), PREFIX_BLOCK_TOKENS)
        elif groups:
            shared_units = round(row.input_tokens * hit_ratio / unit)
            prompt = Prompt(own, rng.choice(groups)[:shared_units], unit)
        else:
            prompt = Prompt(own)
        yield Session(row.at_s, (Turn(max(row.input_tokens, 1), max(row.output_tokens, 1)),), prompt)


def rescaled(
    rows: Sequence[TraceRow], *, speed: float = 1.0, rate_per_s: float | None = None
) -> list[TraceRow]:
    """Play a trace faster or slower.

    Args:
        rows: in order of time, from 0.
        speed: so many times as fast.
        rate_per_s: instead, with so many requests a second on average.

    Raises:
        ConfigError: a speed or rate that is not positive, or absurd.
    """
    for name, value in (("speed", speed), ("rate", rate_per_s)):
        if value is not None and not 0 < value <= _RATE_MAX:
            raise ConfigError(f"{name}: must be > 0 and <= {_RATE_MAX:g}, got {value:g}")
    span_s = rows[-1].at_s
    if rate_per_s is not None and span_s > 0:
        speed = rate_per_s * span_s / len(rows)
    return [TraceRow(row.at_s / speed, row.input_tokens, row.output_tokens, row.prefix_ids) for row in rows]


def _make_turns(config: WorkloadConfig, rng: random.Random) -> Iterator[Turn]:
    so_far = config.shared_prefix_tokens
    for number in range(config.turns):
        think_s = rng.expovariate(1.0 / config.think_s) if number and config.think_s else 0.0
        so_far += _length(config.input_tokens, config.spread, rng)
        output_tokens = _length(config.output_tokens, config.spread, rng)
        yield Turn(so_far, output_tokens, think_s)
        so_far += output_tokens


def _length(mean: int, spread: float, rng: random.Random) -> int:
    """Draw a log-normal length of this mean."""
    if not spread:
        return mean
    return max(1, round(mean * math.exp(rng.gauss(-spread * spread / 2, spread))))
