"""Finds the largest rate at which a simulated layout meets the targets, and the latencies at that rate."""

import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.perf.search.demand import Demand
from penstock.perf.search.search import Layout
from penstock.plan.graph_text import graph_of
from penstock.plan.largest_rate import largest_rate
from penstock.plan.question import Question
from penstock.sim.deployment import Deployment, plan_deployment
from penstock.sim.report.report import latencies_s
from penstock.sim.simulate import Recording, simulate
from penstock.sim.workload.workload import WorkloadConfig, make_sessions

_SEED = 0
_BEGIN, _END = 0.2, 0.9
"""Only requests between these fractions of arrivals count: the first ones find empty workers, the last ones emptying workers."""
_LIFETIMES = 2.0
_REQUESTS_MIN = 150
_LONG = 4.0
"""Weight above which a run has fewer requests."""
_SAMPLES = 100
_SMALLEST = 0.05
"""Rates below this fraction of the prediction count as 0."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Precision and cost of the search for a rate."""

    requests: int
    """Least requests of one run."""
    precision: float
    """Relative precision of the rate."""
    step: float
    """Factor between rates until the largest rate is bracketed."""
    layouts: int
    """Most layouts simulated of each kind, aggregated and disaggregated."""
    requests_max: int = 20_000
    """Most requests of all runs of one kind, weighted by `weight`; beyond it fewer layouts are simulated, or none."""
    begin: float = 0.95
    """First rate, as a fraction of the predicted one."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Latencies of simulated requests at one rate, at the demand's percentile."""

    rate_per_s: float
    ttft_s: float
    itl_s: float
    kv_share: float
    """Largest sampled fraction of a worker's KV in use, of the fullest role."""

    def meets(self, demand: Demand) -> bool:
        return self.ttft_s <= demand.ttft_s and self.itl_s <= demand.itl_s


@dataclass(frozen=True, slots=True)
class Proposal:
    """A layout with the largest rate that meets the targets."""

    layout: Layout
    seen: Seen
    is_simulated: bool
    """True: measured on the simulator. False: predicted by the latency model."""


def predicted(layout: Layout) -> Proposal:
    """Make a proposal from the search's prediction."""
    said = layout.prediction
    seen = Seen(layout.rate_per_s, said.ttft_s, said.itl_s, min(said.kv_share, 1.0))
    return Proposal(layout, seen, is_simulated=False)


def try_layout(
    question: Question, layout: Layout, effort: Effort, known: Seen | None = None
) -> Proposal | None:
    """Simulate a layout at different rates to find the largest; None if it meets the targets at no rate.

    Args:
        question: model, devices, workload and targets.
        layout: the layout to simulate.
        effort: precision and cost.
        known: latencies at a rate that meets the targets, as the start.
    """
    deployment = plan_deployment(graph_of(question, layout), beside=Path())
    best = known

    def is_kept(rate_per_s: float) -> bool:
        nonlocal best
        seen = simulate_rate(deployment, question.demand, rate_per_s, effort.requests)
        if meets := seen.meets(question.demand):
            best = seen
        return meets

    largest_rate(
        is_kept,
        effort.begin * layout.rate_per_s if known is None else effort.step * known.rate_per_s,
        step=effort.step,
        precision=effort.precision,
        known_per_s=0.0 if known is None else known.rate_per_s,
        least_per_s=_SMALLEST * layout.rate_per_s,
    )
    return None if best is None else Proposal(layout, best, is_simulated=True)


def requests_of_run(demand: Demand, rate_per_s: float, least: int) -> int:
    """Give the requests of a run: `least`, fewer with long prompts, more if the run would end before the workers are full."""
    enough = max(math.ceil(least / max(weight(demand) / _LONG, 1)), min(least, _REQUESTS_MIN))
    lifetime_s = demand.ttft_s + demand.itl_s * demand.output_tokens
    return max(enough, math.ceil(_LIFETIMES * lifetime_s * rate_per_s))


def weight(demand: Demand) -> float:
    """Give the cost of simulating a request in short requests: about 1 ms each, 17 ms with 130,000 tokens."""
    return 1 + demand.input_tokens / 8000


def simulate_rate(deployment: Deployment, demand: Demand, rate_per_s: float, requests: int) -> Seen:
    """Simulate at least `requests` requests at a rate."""
    workload = WorkloadConfig(
        requests=requests_of_run(demand, rate_per_s, requests),
        rate_per_s=rate_per_s,
        input_tokens=demand.input_tokens,
        output_tokens=demand.output_tokens,
    )
    sessions = list(make_sessions(workload, random.Random(_SEED)))
    recording = simulate(
        deployment, sessions, seed=_SEED, sample_interval_s=max(sessions[-1].at_s / _SAMPLES, 0.01)
    )
    return _seen(recording, demand, rate_per_s)


def _seen(recording: Recording, demand: Demand, rate_per_s: float) -> Seen:
    sent_s = np.asarray(recording.sent_s)
    if recording.failed or not len(sent_s):
        return Seen(rate_per_s, math.inf, math.inf, 1.0)
    begin_s, end_s = np.quantile(sent_s, [_BEGIN, _END])
    counted = (sent_s >= begin_s) & (sent_s <= end_s)
    ttft_s, itl_s, _ = latencies_s(recording)
    samples = recording.samples
    assert samples is not None, "asked for"
    used, there = samples.of("active_blocks"), samples.of("total_blocks")
    return Seen(
        rate_per_s,
        float(np.percentile(ttft_s[counted], demand.percentile)),
        float(np.percentile(itl_s[counted], demand.percentile)),
        float(np.nanmax(used / there)) if used.size else 0.0,
    )
