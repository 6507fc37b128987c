"""Synthetic workloads of other shapes than the trace: what a policy does that was looked at beside one trace only."""

import random
from collections.abc import Callable, Iterator, Mapping
from itertools import count

from benchmarks.eviction.conversations import Chats, between, lognormal, once, turns, turns_of
from penstock.sim.trace import TraceRow

_SPAN_S = 3000.0
_PHASE_S = 600.0

_AGENTS = Chats(0.5, [8] * 5, turns(12), between(2, 60), lognormal(6, 0.8), lognormal(2, 0.8))
_ONE_SHOT = Chats(5.0, [8] * 400, once, once, lognormal(6, 1.0), once)
_TALKS = Chats(0.7, [2], turns(5), between(10, 300), lognormal(6, 0.8), lognormal(2, 0.8))
_SCANS = Chats(2.0, [1], once, once, lognormal(30, 0.7), once)
_PHASE_TALKS = Chats(1.0, [4] * 3, turns(6), between(5, 200), lognormal(8, 0.8), lognormal(2, 0.8))
_PHASE_ONE_SHOT = Chats(6.0, [12] * 200, once, once, lognormal(8, 0.8), once)


def _requests(
    rng: random.Random, ids: Iterator[int], chats: Chats, start_s: float = 0.0, span_s: float = _SPAN_S
) -> Iterator[TraceRow]:
    return (turn.row for turn in turns_of(rng, ids, chats, start_s=start_s, span_s=span_s))


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
