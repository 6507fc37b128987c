"""Finds the largest rate at which a simulated layout meets the targets, and the latencies at that rate."""

import math
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from penstock.core import log
from penstock.core.errors import ConfigError
from penstock.perf.pool import Demand
from penstock.perf.search import Layout
from penstock.plan.question import Question, graph_of
from penstock.sim.deployment import SimDeployment, plan_deployment
from penstock.sim.report import latencies_s
from penstock.sim.simulate import Recording, simulate
from penstock.sim.workload import WorkloadConfig, make_sessions


class Bracket(NamedTuple):
    """The ends of a search, in requests per second."""

    low: float
    """The largest rate that was kept; 0 where no rate was."""
    high: float
    """The smallest rate that was not kept; infinite where every rate was."""


def largest_rate(
    is_kept: Callable[[float], bool],
    start_per_s: float,
    *,
    step: float,
    precision: float,
    known_per_s: float = 0.0,
    least_per_s: float = 0.0,
    most_per_s: float = math.inf,
) -> Bracket:
    """Search the largest rate for which `is_kept` holds, if `is_kept` holds for all smaller rates.

    Args:
        is_kept: runs one trial at a rate.
        start_per_s: rate of the first trial.
        step: factor between trials until one rate is kept and one is not. Each later trial halves the bracket geometrically.
        precision: the search ends once `high <= low * (1 + precision)`.
        known_per_s: a rate that is known to be kept.
        least_per_s: no rate at or below this one is tried.
        most_per_s: no rate at or above this one is tried.
    """
    low, high, rate_per_s = known_per_s, math.inf, start_per_s
    while high > low * (1 + precision) and least_per_s < rate_per_s < most_per_s:
        if is_kept(rate_per_s):
            low = rate_per_s
        else:
            high = rate_per_s
        if not low:
            rate_per_s = high / step
        elif math.isinf(high):
            rate_per_s = low * step
        else:
            rate_per_s = math.sqrt(low * high)
    return Bracket(low, high)


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
class TrialLatencies:
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
    seen: TrialLatencies
    is_simulated: bool
    """True: measured on the simulator. False: predicted by the latency model."""


def predicted(layout: Layout) -> Proposal:
    """Make a proposal from the search's prediction."""
    said = layout.prediction
    seen = TrialLatencies(layout.rate_per_s, said.ttft_s, said.itl_s, min(said.kv_share, 1.0))
    return Proposal(layout, seen, is_simulated=False)


def try_layout(
    question: Question, layout: Layout, effort: Effort, known: TrialLatencies | None = None
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


def simulate_rate(
    deployment: SimDeployment, demand: Demand, rate_per_s: float, requests: int
) -> TrialLatencies:
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


def _seen(recording: Recording, demand: Demand, rate_per_s: float) -> TrialLatencies:
    sent_s = np.asarray(recording.sent_s)
    if recording.failed or not len(sent_s):
        return TrialLatencies(rate_per_s, math.inf, math.inf, 1.0)
    begin_s, end_s = np.quantile(sent_s, [_BEGIN, _END])
    counted = (sent_s >= begin_s) & (sent_s <= end_s)
    ttft_s, itl_s, _ = latencies_s(recording)
    samples = recording.samples
    assert samples is not None, "asked for"
    used, there = samples.of("active_blocks"), samples.of("total_blocks")
    return TrialLatencies(
        rate_per_s,
        float(np.percentile(ttft_s[counted], demand.percentile)),
        float(np.percentile(itl_s[counted], demand.percentile)),
        float(np.nanmax(used / there)) if used.size else 0.0,
    )


JOBS_MAX = 8
_SIGNALLED = 128


class Processes:
    """A process pool that ignores Ctrl-C; leaving its context ends it, and so does SIGTERM."""

    def __init__(self, jobs: int | None = None) -> None:
        """Create a pool of `jobs` processes, by default one for each core and at most `JOBS_MAX`.

        Raises:
            ConfigError: jobs < 1.
        """
        if jobs is not None and jobs < 1:
            raise ConfigError(f"--jobs: must be >= 1, got {jobs}")
        count = jobs or min(len(os.sched_getaffinity(0)), JOBS_MAX)
        self._count = count
        self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _prepare)

    def __enter__(self) -> Self:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the processes started now
        try:
            for _ in range(self._count):
                self._pool.submit(os.getpid)
        finally:
            signal.signal(signal.SIGINT, handler)
        self._on_sigterm = signal.signal(signal.SIGTERM, _exit)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Ended first: a process that finds its pipe closed writes a traceback. Jobs that have not begun then fail, which wakes
        # threads that wait for them; `cancel_futures` of Python 3.11 would leave such threads waiting.
        for child in multiprocessing.active_children():
            child.terminate()
        self._pool.shutdown(wait=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._pool.submit(function, *arguments)


def _exit(number: int, _frame: FrameType | None) -> None:
    """Exit in order, so that no semaphore leaks."""
    sys.exit(_SIGNALLED + number)


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # in a process that was started later
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log.configure("error", process="plan")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
