"""Conversations behind system prompts, as the requests of a workload."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from penstock.sim.trace import PREFIX_BLOCK_TOKENS, TraceRow

_OUTPUT_TOKENS = 200

Draw = Callable[[random.Random], float]


@dataclass(frozen=True)
class Chats:
    """Conversations that begin at `rate` a second behind one of the system prompts, the first of which is most used.

    Lengths are in blocks.
    """

    rate: float
    systems: Sequence[int]
    turns: Draw
    pause_s: Draw
    first: Draw
    more: Draw


class Turn(NamedTuple):
    """One request of a conversation.

    conversation: its number among those of its kind.
    number:       of the turn, from 0.
    system:       leading blocks that are the system prompt.
    """

    row: TraceRow
    conversation: int
    number: int
    is_last: bool
    system: int


def lognormal(median: float, sigma: float) -> Draw:
    return lambda rng: rng.lognormvariate(math.log(median), sigma)


def between(low: float, high: float) -> Draw:
    """Draw with an even logarithm."""
    return lambda rng: math.exp(rng.uniform(math.log(low), math.log(high)))


def turns(mean: float) -> Draw:
    return lambda rng: 1 + rng.expovariate(1 / mean)


def once(rng: random.Random) -> float:  # noqa: ARG001 - as other draws
    return 1


def turns_of(
    rng: random.Random, ids: Iterator[int], chats: Chats, *, start_s: float = 0.0, span_s: float
) -> Iterator[Turn]:
    """Draw the conversations that begin within `span_s`, one after another; their blocks are named by `ids`."""
    systems = [list(islice(ids, blocks)) for blocks in chats.systems]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    at_s = start_s
    conversation = 0
    while (at_s := at_s + rng.expovariate(chats.rate)) < start_s + span_s:
        system = rng.choices(systems, weights)[0]
        blocks = [*system, *islice(ids, max(1, int(chats.first(rng))))]
        turn_s = at_s
        count = int(chats.turns(rng))
        for number in range(count):
            row = TraceRow(turn_s, len(blocks) * PREFIX_BLOCK_TOKENS, _OUTPUT_TOKENS, tuple(blocks))
            yield Turn(row, conversation, number, number == count - 1, len(system))
            blocks += islice(ids, max(1, int(chats.more(rng))))
            turn_s += chats.pause_s(rng)
        conversation += 1
