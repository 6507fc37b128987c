"""A layout on the simulator: the largest rate at which it keeps the targets, and what requests see then."""

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
"""Of the requests in order of arrival, those between these parts count: the first find it empty, the last see it run dry."""
_LIFETIMES = 2.0
_REQUESTS_MIN = 150
_LONG = 4.0
"""Requests of more weight than this are fewer."""
_SAMPLES = 100
_SMALLEST = 0.05
"""Below this part of what was predicted, a rate is none."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How precisely to look for a rate."""

    requests: int
    """Of one run, at least."""
    precision: float
    """Relative, of the rate."""
    step: float
    """Factor between rates until one is too much and one is not."""
    layouts: int
    """Of either kind, so many at most."""
    requests_max: int = 20_000
    """Of all runs for one kind, longer prompts counted as more of them; beyond, fewer layouts are simulated, or none."""
    begin: float = 0.95
    """Of the predicted rate, where to begin."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the simulated requests saw at one rate; times at the demand's percentile."""

    rate_per_s: float
    ttft_s: float
    itl_s: float
    kv_share: float
    """Of a worker's KV, the most that any sample found in use; of the fullest role."""

    def keeps(self, demand: Demand) -> bool:
        return self.ttft_s <= demand.ttft_s and self.itl_s <= demand.itl_s


@dataclass(frozen=True, slots=True)
class Proposal:
    """A layout at the largest rate that keeps the targets."""

    layout: Layout
    seen: Seen
    is_simulated: bool
    """Whether requests saw this on the simulator; else the latency model predicts it."""


def predicted(layout: Layout) -> Proposal:
    """Propose a layout as the search found it."""
    said = layout.prediction
    seen = Seen(layout.rate_per_s, said.ttft_s, said.itl_s, min(said.kv_share, 1.0))
    return Proposal(layout, seen, is_simulated=False)


def try_layout(
    question: Question, layout: Layout, effort: Effort, known: Seen | None = None
) -> Proposal | None:
    """Simulate a layout at one rate after the other; None where it keeps the targets at none.

    Args:
        question: what is asked.
        layout: what answers it.
        effort: how precisely.
        known: a rate that is known to keep the targets, to go on from.
    """
    deployment = plan_deployment(graph_of(question, layout), beside=Path())
    best = known

    def is_kept(rate_per_s: float) -> bool:
        nonlocal best
        seen = play(deployment, question.demand, rate_per_s, effort.requests)
        if keeps := seen.keeps(question.demand):
            best = seen
        return keeps

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
    """Say how many requests a run has: `least`, fewer where prompts are long, or more where those would be over before the deployment is full."""
    enough = max(math.ceil(least / max(weight(demand) / _LONG, 1)), min(least, _REQUESTS_MIN))
    lifetime_s = demand.ttft_s + demand.itl_s * demand.output_tokens
    return max(enough, math.ceil(_LIFETIMES * lifetime_s * rate_per_s))


def weight(demand: Demand) -> float:
    """Say how many requests with short prompts take as long to simulate: about 1 ms each, and 17 ms with 130,000 tokens."""
    return 1 + demand.input_tokens / 8000


def play(deployment: Deployment, demand: Demand, rate_per_s: float, requests: int) -> Seen:
    """Simulate so many requests at least, at a rate."""
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
