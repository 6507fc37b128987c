"""The workloads S, synthetic after a published setting, and M, a recorded trace; and the share of each that a cache could reuse."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

from penstock.core.errors import ConfigError
from penstock.sim.workload.prompt import Prompt, named, named_units
from penstock.sim.workload.trace import read_trace
from penstock.sim.workload.workload import Session, Turn, rescaled, trace_sessions

SYNTHETIC, RECORDED = "S", "M"

GROUPS = 64
"""Groups of sessions whose prompts begin alike; the k-th is drawn in proportion to k^-1.1."""
ZIPF = 1.1
GROUP_TOKENS = (2_000, 16_000)
"""Shortest and longest prefix of a group, log-uniform over the groups."""
GROUPED_SHARE = 0.1
"""Share of sessions that belong to a group; others share no prefix."""
TURNS = (0.3, 0.3, 0.2, 0.1, 0.1)
"""Shares of sessions with one turn, two and so on; 2.4 on average."""
NEW_TOKENS, OUTPUT_TOKENS = 1_210, 800
"""Means of each turn; with the above, 4,000 prompt tokens on average, of which 68 % could be reused."""
LENGTH_SIGMA = 0.7
"""Standard deviation of the lengths' logarithm."""
THINK_S = 20.0
"""Mean time between an answer and the next turn, exponential."""
_UNIT_TOKENS = 16
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Workload:
    """So many requests of `SYNTHETIC` or `RECORDED`. `trace` is the file of `RECORDED`, of which `skip` requests are left out first."""

    name: str
    requests: int
    trace: Path | None = None
    skip: int = 0

    def sessions(self, rate_per_s: float, seed: int = 1) -> Sequence[Session]:
        """Draw the sessions of one run, in order of time.

        Args:
            rate_per_s: requests on average.
            seed: of the draw.

        Raises:
            ConfigError: the trace cannot be read, or ends before the first request.
        """
        return _sessions(self, rate_per_s, seed)


@lru_cache(maxsize=1)
def _sessions(workload: Workload, rate_per_s: float, seed: int) -> Sequence[Session]:
    """Draw the sessions once for all policies that run them one after the other."""
    if workload.name == SYNTHETIC:
        return list(_synthetic(workload.requests, rate_per_s, seed))
    if workload.trace is None:
        raise ConfigError(f"workload {workload.name}: it is read from a trace; give one with --trace")
    rows = read_trace(workload.trace)[workload.skip :][: workload.requests]
    if not rows:
        raise ConfigError(
            f"{workload.trace}: has no more than {workload.skip} requests; take fewer or shorter parts"
        )
    rows = [replace(row, at_s=row.at_s - rows[0].at_s) for row in rows]
    return list(trace_sessions(rescaled(rows, rate_per_s=rate_per_s), seed=seed))


def _synthetic(requests: int, rate_per_s: float, seed: int) -> Iterator[Session]:
    rng = random.Random(seed)
    run = rng.getrandbits(62)
    shortest, longest = GROUP_TOKENS
    # Golden steps spread the lengths evenly whatever the popularity, so that seeds differ little in their means.
    lengths = [shortest * (longest / shortest) ** ((k * _GOLDEN) % 1.0) for k in range(1, GROUPS + 1)]
    groups = [named_units(named(run, 1, k), round(tokens / _UNIT_TOKENS)) for k, tokens in enumerate(lengths)]
    weights = list(accumulate((k + 1) ** -ZIPF for k in range(GROUPS)))
    turns_mean = sum(share * (n + 1) for n, share in enumerate(TURNS))
    at_s, number, left = 0.0, 0, requests
    while left > 0:
        (turns,) = rng.choices(range(1, len(TURNS) + 1), TURNS)
        shared = groups[0][:0]
        if rng.random() < GROUPED_SHARE:
            (shared,) = rng.choices(groups, cum_weights=weights)
        prompt = Prompt(named(run, 2, number), shared, _UNIT_TOKENS)
        yield Session(at_s, tuple(_turns(len(shared) * _UNIT_TOKENS, min(turns, left), rng)), prompt)
        number, left = number + 1, left - turns
        at_s += rng.expovariate(rate_per_s / turns_mean)


def _turns(prefix_tokens: int, count: int, rng: random.Random) -> Iterator[Turn]:
    so_far = prefix_tokens
    for number in range(count):
        think_s = rng.expovariate(1.0 / THINK_S) if number else 0.0
        so_far += _length(NEW_TOKENS, rng)
        output_tokens = _length(OUTPUT_TOKENS, rng)
        yield Turn(so_far, output_tokens, think_s)
        so_far += output_tokens


def _length(mean: int, rng: random.Random) -> int:
    """Draw a log-normal length of this mean."""
    return max(1, round(mean * math.exp(rng.gauss(-LENGTH_SIGMA * LENGTH_SIGMA / 2, LENGTH_SIGMA))))


def reusable_share(sessions: Sequence[Session], block_size: int) -> float:
    """Give the share of prompt tokens that an unbounded cache would hold, with sessions one after the other."""
    seen: set[int] = set()
    found = total = 0
    for session in sessions:
        for turn in session.turns:
            ends = turn.input_tokens // block_size, (turn.input_tokens + turn.output_tokens) // block_size
            names = session.prompt.block_hashes(block_size, 0, ends[1])[:, 0].tolist()
            # One token is computed in any case: the last block of a prompt is not taken from the cache whole.
            most = (turn.input_tokens - 1) // block_size
            depth = next((n for n in range(most) if names[n] not in seen), most)
            found += depth * block_size
            total += turn.input_tokens
            seen.update(names)
    return found / total if total else 0.0


def mean_tokens(sessions: Sequence[Session]) -> tuple[float, float]:
    """Give the mean prompt and the mean answer."""
    turns = [turn for session in sessions for turn in session.turns]
    return (
        float(np.mean([turn.input_tokens for turn in turns])),
        float(np.mean([turn.output_tokens for turn in turns])),
    )
