"""The largest goodput of a simulated deployment: the largest rate at which enough requests meet the targets."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.graph import Slo
from penstock.plan.largest_rate import largest_rate
from penstock.sim.deployment import Deployment
from penstock.sim.report.report import is_good
from penstock.sim.simulate import simulate
from penstock.sim.workload.workload import WorkloadConfig, make_sessions

_SEED = 0
_LIFETIMES = (
    2.5  # the first third fills the deployment, the second is measured, the last keeps it full meanwhile
)
_FACTOR_MIN, _FACTOR_MAX = 0.02, 4.0
"""A rate is searched between these multiples of the estimate."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Rates per second at the largest rate that meets the targets; 0 if no rate does."""

    rate_per_s: float
    """Requests that arrive."""
    good_per_s: float
    """Of them, those that meet both targets."""


@dataclass(frozen=True, slots=True)
class Search:
    """Precision of the search, and requests of a run."""

    precision: float = 0.05
    """Relative, of the rate."""
    step: float = 1.15
    """Factor between rates until one meets the targets and one does not."""
    requests_min: int = 1000
    requests_max: int = 200_000

    def largest(
        self,
        deployment: Deployment,
        workload: Callable[[int, float], WorkloadConfig],
        slo: Slo,
        start_per_s: float,
    ) -> Goodput:
        """Find the largest rate at which `slo.percentile` of the requests meet both targets.

        Args:
            deployment: what serves them.
            workload: makes the workload of so many requests at a rate.
            slo: the targets.
            start_per_s: an estimate, which is tried first.
        """
        needed = slo.percentile / 100

        def good_share(rate_per_s: float) -> float:
            config = workload(1, rate_per_s)
            lifetime_s = slo.ttft_s + slo.itl_s * config.output_tokens
            requests = math.ceil(_LIFETIMES * lifetime_s * rate_per_s)
            requests = min(max(requests, self.requests_min), self.requests_max)
            return _good_share(deployment, workload(requests, rate_per_s), slo)

        shares = {0.0: 0.0}

        def is_kept(rate_per_s: float) -> bool:
            shares[rate_per_s] = good_share(rate_per_s)
            return shares[rate_per_s] >= needed

        low, _ = largest_rate(
            is_kept,
            start_per_s,
            step=self.step,
            precision=self.precision,
            least_per_s=_FACTOR_MIN * start_per_s,
            most_per_s=_FACTOR_MAX * start_per_s,
        )
        return Goodput(low, low * shares[low])


def _good_share(deployment: Deployment, workload: WorkloadConfig, slo: Slo) -> float:
    """Give the share of good requests among the requests sent in the middle third. Failed requests are not good."""
    sessions = list(make_sessions(workload, random.Random(_SEED)))
    recording = simulate(deployment, sessions, seed=_SEED)
    third = len(sessions) // 3
    begin_s, end_s = sessions[third].at_s, sessions[len(sessions) - third - 1].at_s
    sent_s = np.asarray(recording.sent_s)
    middle = (sent_s >= begin_s) & (sent_s <= end_s)
    return float(is_good(recording, slo)[middle].sum()) / max(1, len(sessions) - 2 * third)
