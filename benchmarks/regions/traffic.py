"""Questions about documents in three regions, whose busy hours follow each other."""

import math
import random
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from penstock.sim.workload.prompt import Prompt, named, named_units

_UNIT_TOKENS = 64
_SWING = 0.8


@dataclass(frozen=True, slots=True)
class Traffic:
    """A day of `day_s` seconds.

    rate_per_s:      of each region, mean over the day; at its peak 1.8 times as many, at night 0.2
    documents:       that all regions ask about, and as many that each region asks about alone
    zipf:            exponent of their popularity
    document_tokens: shared by all questions about one
    question_tokens: after it
    output_tokens:   of an answer
    """

    regions: int
    day_s: float
    rate_per_s: float
    documents: int = 4000
    zipf: float = 0.9
    document_tokens: int = 12_288
    question_tokens: int = 512
    output_tokens: int = 64

    @property
    def prompt_tokens(self) -> int:
        return self.document_tokens + self.question_tokens


@dataclass(frozen=True, slots=True)
class Question:
    """A request of a region's client."""

    at_s: float
    region: int
    prompt: Prompt


def questions(traffic: Traffic, rng: random.Random) -> Iterator[Question]:
    """Give a day's questions in the order of time."""
    run = rng.getrandbits(62)
    weights = list(accumulate((rank + 1) ** -traffic.zipf for rank in range(traffic.documents)))
    units: dict[tuple[int, int], Prompt] = {}
    peak = traffic.rate_per_s * (1 + _SWING) * traffic.regions
    at_s, number = 0.0, 0
    while (at_s := at_s + rng.expovariate(peak)) < traffic.day_s:
        region = rng.randrange(traffic.regions)
        phase = 2 * math.pi * (at_s / traffic.day_s - region / traffic.regions)
        if rng.random() * (1 + _SWING) > 1 + _SWING * math.sin(phase):
            continue
        rank = bisect(weights, rng.random() * weights[-1])
        key = (region + 1 if rng.random() < 0.5 else 0, rank)
        if key not in units:
            names = named_units(named(run, 1, *key), traffic.document_tokens // _UNIT_TOKENS)
            units[key] = Prompt(0, names, _UNIT_TOKENS)
        number += 1
        yield Question(at_s, region, Prompt(named(run, 2, number), units[key].shared, _UNIT_TOKENS))
