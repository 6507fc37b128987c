"""Prefixes loaded while their requests wait for the batch, on simulated workers: without it, and with it, over tiers of several speeds.

A recorded trace runs on 70B workers at a rate at which prompts wait for each other. Each tier is alone below the device. The same
trace runs with several seeds, which decide between equal workers, since one choice changes what is cached for all that follow.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.runner import default_jobs, find_graph
from benchmarks.runner.workload import RECORDED, SYNTHETIC, Workload
from penstock.bench.report import Report
from penstock.core import log
from penstock.core.errors import ConfigError
from penstock.sim.report.report import latencies_s
from penstock.sim.simulate import simulate

DEPLOYMENT = "70b-fp8"
TIERS = {"host": "5x", "disk": "20x", "object": "20x"}
"""Sizes, in multiples of the device's blocks."""
PREFETCH = {"without": 0, "with": 16}
"""Requests that load before their turn."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """One simulation."""

    tier: str
    mode: str
    seed: int
    workload: Workload
    rate_per_s: float
    examples: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="in Mooncake's format (default: synthetic chats)")
    add("--requests", type=int, default=3000, metavar="N", help="of the trace (default %(default)s)")
    add("--rate", type=float, default=5.5, metavar="R", help="requests per second (default %(default)s)")
    add("--seeds", type=int, default=5, metavar="N", help="runs of each kind (default %(default)s)")
    add("--jobs", type=int, default=default_jobs(), metavar="N", help="processes (default: all cores)")
    add("--examples", type=Path, default=Path("examples"), metavar="DIR", help="graphs (default %(default)s)")


def run(options: argparse.Namespace) -> Report:
    """Simulate every tier without and with prefetches.

    Raises:
        ConfigError: an option or file is wrong.
    """
    for name in ("requests", "rate", "seeds", "jobs"):
        if getattr(options, name) <= 0:
            raise ConfigError(f"--{name}: must be > 0, got {getattr(options, name)}")
    requests, seeds = (300, 2) if options.quick else (options.requests, options.seeds)
    workload = Workload(SYNTHETIC if options.trace is None else RECORDED, requests, options.trace)
    cells = [
        _Cell(tier, mode, seed, workload, options.rate, options.examples)
        for tier, seed, mode in product(TIERS, range(1, seeds + 1), PREFETCH)
    ]
    samples: dict[str, list[float]] = {}
    with get_context("spawn").Pool(min(options.jobs, len(cells))) as pool:
        for cell, figures in zip(cells, pool.imap(_simulate, cells), strict=True):
            print(
                f"{cell.tier} {cell.mode}, seed {cell.seed}: TTFT {figures['ttft_mean_s']:.3f} s",
                file=sys.stderr,
                flush=True,
            )
            for name, value in figures.items():
                samples.setdefault(f"{name} {cell.tier} {cell.mode}", []).append(value)
    return Report(
        name="kv-prefetch",
        config={
            "deployment": DEPLOYMENT,
            "tiers": TIERS,
            "prefetch": PREFETCH["with"],
            "trace": None if options.trace is None else options.trace.name,
            "requests": requests,
            "rate_per_s": options.rate,
            "seeds": seeds,
            "quick": options.quick,
        },
        figures=judge(samples),
        samples=samples,
        problems=[name for name, each in samples.items() if name.startswith("failed") and any(each)],
    )


def judge(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Give the mean of each figure over the seeds, and how much lower TTFT is with prefetches."""
    figures = {name: float(np.mean(each)) for name, each in samples.items()}
    for tier, metric in product(TIERS, ("ttft_mean_s", "ttft_p90_s", "reusing_ttft_mean_s")):
        without, with_it = (np.asarray(samples[f"{metric} {tier} {mode}"]) for mode in PREFETCH)
        change = with_it.mean() / without.mean() - 1
        figures[f"{metric} {tier} change"] = float(change)
        if len(without) > 1:
            error = np.hypot(*(each.std(ddof=1) / np.sqrt(len(each)) for each in (without, with_it)))
            figures[f"{metric} {tier} change_error"] = float(error / without.mean())
    return figures


def _simulate(cell: _Cell) -> dict[str, float]:
    log.configure("warning", process="kv-prefetch")
    settings = (
        f"roles.aggregated.kv.{cell.tier}={TIERS[cell.tier]}",
        f"roles.aggregated.kv.prefetch={PREFETCH[cell.mode]}",
    )
    deployment = find_graph(cell.examples, DEPLOYMENT, settings).deployment()
    made = cell.workload.sessions(cell.rate_per_s, cell.seed)
    deployment.check(made)
    recording = simulate(deployment, made, seed=cell.seed)
    ttft_s, _, _ = latencies_s(recording)
    prompts, cached = np.asarray(recording.prompt_tokens), np.asarray(recording.cached_tokens)
    reusing = cached >= prompts / 4
    return {
        "failed": float(recording.failed),
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p90_s": float(np.percentile(ttft_s, 90)),
        "reusing_ttft_mean_s": float(ttft_s[reusing].mean()) if reusing.any() else 0.0,
        "hit_share": float(cached.sum() / prompts.sum()),
        "loaded_share": float(sum(recording.onboarded_tokens) / prompts.sum()),
    }
