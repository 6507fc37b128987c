"""What the planner is compared with: a horizontal autoscaler, throughput interpolation, and an oracle."""

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from benchmarks.planner.workload import Workload
from benchmarks.planner.world.cluster import Cluster
from penstock.core.types.instances import Role
from penstock.planner.actor import Actor
from penstock.planner.capacity import Capacity
from penstock.planner.demand import ExpectedDemand, SloTargets
from penstock.runtime.observations import Digest, bucket_of

_ORACLE_BIN_S = 30.0
_LENGTH_BINS = 4
"""So many bins share the lengths of the requests around them."""
_AHEAD_S = 15.0
"""The oracle's workers are ready so long before they are needed."""


class Strategy(Protocol):
    """Scales a cluster until it is cancelled."""

    async def run(self, cluster: Cluster) -> None: ...


class Static:
    """As many workers as in the beginning."""

    async def run(self, cluster: Cluster) -> None:
        del cluster


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """Kubernetes' horizontal autoscaler on open requests per worker: 15 s period, 10 % tolerance, 300 s of stabilised scale-in.

    It scales out by all at once, at most to the double of the workers or by four in a period, as its default. The workers at the beginning count as
    wanted for the first 300 s, as they do there. Each role is scaled for itself.
    """

    targets: Mapping[Role, float]
    period_s: float = 15.0
    stabilised_s: float = 300.0

    async def run(self, cluster: Cluster) -> None:
        actor = Actor(cluster.connector, by="autoscaler")
        size = round(self.stabilised_s / self.period_s)
        scale = await cluster.connector.scale()
        wanted = {role: deque([len(scale.of(role))], maxlen=size) for role in self.targets}
        while True:
            await asyncio.sleep(self.period_s)
            seen = await cluster.observe(self.period_s)
            scale = await cluster.connector.scale()
            for role, most in self.targets.items():
                workers = seen.of(role)
                if not workers:
                    continue
                number = sum(worker.running_requests + worker.waiting_requests for worker in workers)
                ratio = number / len(workers) / most
                have = len(scale.of(role))
                desired = have if abs(ratio - 1) <= 0.1 else math.ceil(len(workers) * ratio)
                desired = min(desired, max(2 * have, have + 4))
                wanted[role].append(desired)
                target = desired if desired > have else min(have, max(wanted[role]))
                await actor.carry_out({role: max(1, target)})


@dataclass(frozen=True, slots=True)
class Interpolation:
    """The last interval's rate over what one worker of a role serves within the SLO, times a factor."""

    capacities: tuple[Capacity, ...]
    slo: SloTargets
    factor: float = 1.0
    period_s: float = 60.0

    async def run(self, cluster: Cluster) -> None:
        actor = Actor(cluster.connector, by="interpolation")
        while True:
            await asyncio.sleep(self.period_s)
            demand = (await cluster.observe(self.period_s)).demand
            inputs, outputs = demand.input_tokens, demand.output_tokens
            if inputs.mean is None or outputs.mean is None:
                continue
            expected = ExpectedDemand(
                rate_per_s=demand.arrivals_per_s,
                input_tokens=round(inputs.mean),
                output_tokens=max(1, round(outputs.mean)),
                cached_share=demand.cached_share,
            )
            for capacity in self.capacities:
                each_per_s = capacity.rate_per_s(1, expected, self.slo)
                count = math.ceil(self.factor * demand.arrivals_per_s / max(each_per_s, 1e-3))
                await actor.carry_out({capacity.role: min(max(1, count), cluster.fleet.workers_max // 2)})


@dataclass(frozen=True, slots=True)
class Oracle:
    """Starts workers exactly so long before the known rate needs them, and retires them when it no longer does.

    needed: by role, (bins of 30 s,) workers
    """

    needed: Mapping[Role, np.ndarray]

    async def run(self, cluster: Cluster) -> None:
        actor = Actor(cluster.connector, by="oracle")
        reach = math.ceil((cluster.start_s + _AHEAD_S) / _ORACLE_BIN_S) + 1
        while True:
            now_s = asyncio.get_running_loop().time()
            first = int(now_s / _ORACLE_BIN_S)
            for role, needed in self.needed.items():
                ahead = needed[first : first + reach]
                if len(ahead):
                    await actor.carry_out({role: int(ahead.max())})
            await asyncio.sleep(_ORACLE_BIN_S / 2)


def needed(load: Workload, capacity: Capacity, slo: SloTargets, most: int, factor: float = 1.0) -> np.ndarray:
    """Give the workers that each bin of 30 s needs by its own rate and lengths, times a factor of the rate."""
    bins = max(1, math.ceil(load.span_s / _ORACLE_BIN_S))
    edges = np.searchsorted(load.at_s, np.arange(bins + 1) * _ORACLE_BIN_S)
    found = np.ones(bins, dtype=int)
    reusable = load.reusable_tokens()
    for begin in range(0, bins, _LENGTH_BINS):
        low, high = edges[max(0, begin - 2 * _LENGTH_BINS)], edges[min(bins, begin + 3 * _LENGTH_BINS)]
        if high == low:
            continue
        inputs = load.input_tokens[low:high]
        share = float(reusable[low:high].sum() / inputs.sum())
        expected = expect(inputs, load.output_tokens[low:high], 1.0, share)
        for at in range(begin, min(bins, begin + _LENGTH_BINS)):
            rate_per_s = factor * (edges[at + 1] - edges[at]) / _ORACLE_BIN_S
            found[at] = capacity.workers(rate_per_s, expected, slo, most) or most
    return found


def expect(
    inputs: np.ndarray, outputs: np.ndarray, rate_per_s: float, cached_share: float = 0.0
) -> ExpectedDemand:
    """Make the demand of known requests."""
    return ExpectedDemand(
        rate_per_s=rate_per_s,
        input_tokens=round(float(inputs.mean())),
        output_tokens=max(1, round(float(outputs.mean()))),
        cached_share=cached_share,
        input_lengths=_digest(inputs),
        output_lengths=_digest(outputs),
    )


def _digest(values: np.ndarray) -> Digest:
    buckets: dict[int, int] = {}
    numbers, counts = np.unique(values[:: max(1, len(values) // 500)], return_counts=True)
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        bucket = bucket_of(number)
        buckets[bucket] = buckets.get(bucket, 0) + count
    total = sum(counts.tolist())
    return Digest(count=total, total=float(values.mean()) * total, buckets=buckets)
