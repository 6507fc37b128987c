"""Synthetic workloads of other shapes than the trace: what a policy does that was looked at beside one trace only."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from penstock.sim.workload.trace import PREFIX_BLOCK_TOKENS, TraceRow

_SPAN_S = 3000.0
_PHASE_S = 600.0
_OUTPUT_TOKENS = 200

Draw = Callable[[random.Random], float]


@dataclass(frozen=True)
class _Chats:
    """Conversations that begin at `rate` a second behind one of the system prompts, the first of which is most used.

    Lengths are in blocks.
    """

    rate: float
    systems: Sequence[int]
    turns: Draw
    pause_s: Draw
    first: Draw
    more: Draw


def _lognormal(median: float, sigma: float) -> Draw:
    return lambda rng: rng.lognormvariate(math.log(median), sigma)


def _between(low: float, high: float) -> Draw:
    """Draw with an even logarithm."""
    return lambda rng: math.exp(rng.uniform(math.log(low), math.log(high)))


def _turns(mean: float) -> Draw:
    return lambda rng: 1 + rng.expovariate(1 / mean)


def _once(rng: random.Random) -> float:  # noqa: ARG001 - as other draws
    return 1


_AGENTS = _Chats(0.5, [8] * 5, _turns(12), _between(2, 60), _lognormal(6, 0.8), _lognormal(2, 0.8))
_ONE_SHOT = _Chats(5.0, [8] * 400, _once, _once, _lognormal(6, 1.0), _once)
_TALKS = _Chats(0.7, [2], _turns(5), _between(10, 300), _lognormal(6, 0.8), _lognormal(2, 0.8))
_SCANS = _Chats(2.0, [1], _once, _once, _lognormal(30, 0.7), _once)
_PHASE_TALKS = _Chats(1.0, [4] * 3, _turns(6), _between(5, 200), _lognormal(8, 0.8), _lognormal(2, 0.8))
_PHASE_ONE_SHOT = _Chats(6.0, [12] * 200, _once, _once, _lognormal(8, 0.8), _once)


def _requests(
    rng: random.Random, ids: Iterator[int], chats: _Chats, start_s: float = 0.0, span_s: float = _SPAN_S
) -> Iterator[TraceRow]:
    systems = [list(islice(ids, blocks)) for blocks in chats.systems]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    at_s = start_s
    while (at_s := at_s + rng.expovariate(chats.rate)) < start_s + span_s:
        blocks = [*rng.choices(systems, weights)[0], *islice(ids, max(1, int(chats.first(rng))))]
        turn_s = at_s
        for _ in range(int(chats.turns(rng))):
            yield TraceRow(turn_s, len(blocks) * PREFIX_BLOCK_TOKENS, _OUTPUT_TOKENS, tuple(blocks))
            blocks += islice(ids, max(1, int(chats.more(rng))))
            turn_s += chats.pause_s(rng)


def _sorted(*parts: Iterator[TraceRow]) -> list[TraceRow]:
    return sorted((row for part in parts for row in part), key=lambda row: row.at_s)


def agents(seed: int) -> list[TraceRow]:
    """Agents that call tools for 2 to 60 s, behind five system prompts."""
    return _sorted(_requests(random.Random(seed), count(), _AGENTS))


def one_shot(seed: int) -> list[TraceRow]:
    """Prompts that never come back, behind 400 system prompts of different fame."""
    return _sorted(_requests(random.Random(seed), count(), _ONE_SHOT))


def scans(seed: int) -> list[TraceRow]:
    """Conversations beside long documents that are read once, which are most of the blocks."""
    rng, ids = random.Random(seed), count()
    return _sorted(_requests(rng, ids, _TALKS), _requests(rng, ids, _SCANS))


def phases(seed: int) -> list[TraceRow]:
    """Ten minutes of conversations, then ten of one-shot prompts, three times, each with other system prompts."""
    rng, ids = random.Random(seed), count()
    kinds = (_PHASE_TALKS, _PHASE_ONE_SHOT) * 3
    return _sorted(*(_requests(rng, ids, kind, n * _PHASE_S, _PHASE_S) for n, kind in enumerate(kinds)))


WORKLOADS: Mapping[str, Callable[[int], list[TraceRow]]] = {
    "agents": agents,
    "one-shot": one_shot,
    "scans": scans,
    "phases": phases,
}
