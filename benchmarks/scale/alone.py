"""One router alone, before more and more workers: memory, and CPU time of what arrives and of a decision.

Each number of workers has a process of its own, so that memory can be told. What arrives was recorded from several simulated
routers over fewer workers.
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import pairwise
from multiprocessing import get_context

from benchmarks.scale.cluster import Size, simulate
from benchmarks.scale.one_router import Alone, measure
from benchmarks.scale.routers import PER_WORKER_S, RAMP_S, WINDOW_S
from benchmarks.scale.traffic import Recording
from penstock.bench.report import Report
from penstock.core import log

_RECORDED = Size(workers=50, routers=8, per_worker_s=PER_WORKER_S, ramp_s=RAMP_S, window_s=WINDOW_S)
_QUICK = Size(workers=10, routers=3, per_worker_s=PER_WORKER_S, ramp_s=2.0, window_s=1.0)
_WORKERS, _QUICK_WORKERS = (1000, 2000, 4000, 10_000), (10, 20)
CORES_MAX, DECISION_S_MAX, RSS_BYTES_MAX, WHOLE_S_MAX = 1.0, 0.001, 4e9, 60.0
"""Where a router breaks: its process has one core; a decision delays all others; and a start that takes a minute."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        metavar="N",
        help=f"numbers of workers (default {' '.join(map(str, _WORKERS))})",
    )


def run(options: argparse.Namespace) -> Report:
    """Record what reaches one of several routers, and feed it to one alone."""
    log.configure("error", process="bench")
    size = _QUICK if options.quick else _RECORDED
    numbers = options.workers or (_QUICK_WORKERS if options.quick else _WORKERS)
    recording = simulate(size, seed=1).recording
    found = [_in_process(recording, number) for number in numbers]
    figures: dict[str, float] = {}
    for alone in found:
        cores = decision_cores(alone, size)
        figures |= {
            f"{name}_w{alone.workers}": value for name, value in asdict(alone).items() if name != "workers"
        }
        figures[f"decision_cores_w{alone.workers}"] = cores
    return Report(
        name="scale-router",
        config={**asdict(size), "numbers": list(numbers), "quick": options.quick},
        figures=figures | breaking(found, size),
    )


def decision_cores(alone: Alone, size: Size) -> float:
    """Give the CPU seconds of one of `size.routers` routers for the decisions of a second."""
    return alone.decision_us * 1e-6 * alone.workers * size.per_worker_s / size.routers


def breaking(found: Sequence[Alone], size: Size) -> dict[str, float]:
    """Give the number of workers at which each figure passes its limit, on straight lines between those measured and beyond the last."""
    figures: dict[str, tuple[Callable[[Alone], float], float]] = {
        "input_and_decisions": (lambda a: a.input_cores + decision_cores(a, size), CORES_MAX),
        "input": (lambda a: a.input_cores, CORES_MAX),
        "decision": (lambda a: a.decision_us * 1e-6, DECISION_S_MAX),
        "rss": (lambda a: float(a.rss_bytes), RSS_BYTES_MAX),
        "whole": (lambda a: a.whole_cpu_s, WHOLE_S_MAX),
    }
    return {
        f"breaks_at_workers_{name}": crossing([(a.workers, of(a)) for a in found], limit)
        for name, (of, limit) in figures.items()
    }


def crossing(points: Sequence[tuple[float, float]], limit: float) -> float:
    """Give where the line through `points` (x, y) first reaches `limit`; infinite where it never does.

    It begins at the origin, and goes on beyond the last point as between the last two.
    """
    points = [(0.0, 0.0), *points]
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 >= limit:
            return x0 + (x1 - x0) * (limit - y0) / (y1 - y0)
    (x0, y0), (x1, y1) = points[-2:]
    return x1 + (x1 - x0) * (limit - y1) / (y1 - y0) if y1 > y0 else float("inf")


def _in_process(recording: Recording, workers: int) -> Alone:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return executor.submit(_measure, recording, workers).result()


def _measure(recording: Recording, workers: int) -> Alone:
    log.configure("error", process="bench")
    return asyncio.run(measure(recording, workers))
