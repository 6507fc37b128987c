"""Many routers over many workers on virtual time: what reaches each, how alike they choose, and a restart of one."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from statistics import mean

import numpy as np

from benchmarks.runner import expect_at_least
from benchmarks.scale.cluster import (
    GROUPS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SHARED_TOKENS,
    Outcome,
    Size,
    simulate,
)
from penstock.bench.report import BenchReport
from penstock.core import log

PER_WORKER_S, RAMP_S, WINDOW_S = 6.5, 17.0, 1.0
"""Then the first answers end, and a worker has about 105 streams."""
_QUICK = Size(workers=20, routers=3, per_worker_s=PER_WORKER_S, ramp_s=2.0, window_s=1.0)
_SEED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=1000, metavar="N", help="default %(default)s")
    parser.add_argument("--routers", type=int, default=8, metavar="N", help="default %(default)s")


def run(options: argparse.Namespace) -> BenchReport:
    """Simulate several routers under load, and restart one.

    Raises:
        ConfigError: an option is wrong.
    """
    expect_at_least(options, workers=2, routers=3)
    log.configure("error", process="bench")
    size = Size(options.workers, options.routers, PER_WORKER_S, RAMP_S, WINDOW_S)
    size = _QUICK if options.quick else size
    outcome = simulate(size, seed=_SEED, with_restart=True)
    return BenchReport(
        name="scale",
        config={
            **asdict(size),
            "prompt_tokens": PROMPT_TOKENS + SHARED_TOKENS,
            "shared_tokens": SHARED_TOKENS,
            "prefix_groups": GROUPS,
            "output_tokens": OUTPUT_TOKENS,
            "quick": options.quick,
        },
        figures=_figures(outcome),
        samples={"in_flight": [float(n) for n in outcome.in_flight], "ttft_s": _thinned(outcome.ttft_s)},
    )


def _figures(outcome: Outcome) -> Mapping[str, float]:
    """Give what reached a router, the mean of all, and how they chose."""
    seconds = outcome.recording.seconds
    rates = [meter.rates(seconds) for meter in outcome.meters]
    restart = outcome.restart
    assert restart is not None, "asked for"
    return {
        "in_flight": mean(outcome.in_flight),
        **{name: mean(rate[name] for rate in rates) for name in rates[0]},
        "decisions_per_s": outcome.decisions / seconds / len(rates),
        "failed_requests": outcome.failed,
        "unevenness": mean(outcome.unevenness),
        "same_worker_share": outcome.same_worker_share,
        "resent_share": outcome.resent_share,
        "ttft_mean_s": mean(outcome.ttft_s),
        "ttft_p99_s": float(np.percentile(outcome.ttft_s, 99)),
        **{f"restart_{name}": value for name, value in asdict(restart).items()},
    }


def _thinned(values: list[float], most: int = 200) -> list[float]:
    return values[:: max(1, len(values) // most)]
