"""How alike routers choose, and when one that has just started chooses like the others."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import mean

from penstock.core.ids import WorkerId
from penstock.core.types.requests import Request
from penstock.router.dispatch.dispatcher import Dispatcher

_LOOK_S = 0.002
_LOOKS_MAX = 1000
_COMPARED = 3
"""Routers that a new one is compared with."""
_ALIKE_FACTOR, _ALIKE_S = 1.25, 0.0001
"""A new router chooses like the others while its regret is at most theirs times the factor, or so many seconds."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Virtual seconds from a router's start, its own computing not counted.

    ready_s:        until it could choose among all workers.
    whole_s:        until its index held what another router's held.
    alike_s:        until its choices cost no more than others' do; infinite where that took too long.
    regret_s:       what a choice of another router costs beyond one's own, by one's own prices: mean over probes.
    empty_regret_s: the same of the new router as soon as it could choose.
    """

    ready_s: float
    whole_s: float
    alike_s: float
    regret_s: float
    empty_regret_s: float


async def measure_restart(
    others: Sequence[Dispatcher], start: Callable[[], Awaitable[Dispatcher]], probes: Sequence[Request]
) -> Restart:
    """Start a router and follow it until it chooses for `probes` as well as `others` do."""
    loop = asyncio.get_running_loop()
    others = others[:_COMPARED]
    peers_s = mean(regret_s(one, other, probes) for one, other in permutations(others, 2))
    begun_s = loop.time()
    new = await start()
    ready_s = whole_s = empty_s = None
    for _ in range(_LOOKS_MAX):
        await asyncio.sleep(_LOOK_S)
        if ready_s is None and _ready(new) == _ready(others[0]):
            ready_s, empty_s = loop.time() - begun_s, regret_s(others[0], new, probes)
        if ready_s is None or empty_s is None:
            continue
        if whole_s is None and _pairs(new) >= _pairs(others[0]):
            whole_s = loop.time() - begun_s
        if whole_s is not None:
            own_s = mean(regret_s(other, new, probes) for other in others)
            if own_s <= max(_ALIKE_FACTOR * peers_s, _ALIKE_S):
                return Restart(ready_s, whole_s, loop.time() - begun_s, peers_s, empty_s)
    assert ready_s is not None, "workers answer at once"
    assert whole_s is not None, "and send what they hold"
    assert empty_s is not None, "asked for as soon as it was ready"
    return Restart(ready_s, whole_s, math.inf, peers_s, empty_s)


def regret_s(judge: Dispatcher, other: Dispatcher, probes: Sequence[Request]) -> float:
    """Give the mean seconds that the choices of `other` cost beyond those of `judge`, as `judge` prices them."""
    beyond_s = []
    for probe in probes:
        own, theirs = judge._shared.router.score(probe), other._shared.router.score(probe)
        assert own is not None, "it knows workers"
        assert theirs is not None, "it knows workers"
        worker_id = WorkerId(int(theirs.context.worker_ids[theirs.choice.slot]))
        slot = judge._shared.fleet.slot_of(worker_id)
        assert slot is not None, "both know the same workers"
        beyond_s.append(own.choice.costs_more(slot))
    return mean(beyond_s)


def _ready(dispatcher: Dispatcher) -> int:
    return sum(int(pool.ready.sum()) for pool in dispatcher._shared.fleet.pools.values())


def _pairs(dispatcher: Dispatcher) -> int:
    return dispatcher._shared.fleet.tree.stats().pairs
