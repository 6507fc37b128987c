"""Prefixes loaded while their requests wait for the batch, on simulated workers: without it, and with it, over tiers of several speeds.

Parts of a recorded trace run on 70B workers, each from cold caches, at a rate at which prompts wait for each other. Each tier is
alone below the device. Each part is a run of its own without and with prefetches, so they are compared part by part.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.runner import RECORDED, SYNTHETIC, Workload, add_simulations, expect_at_least, find_graph
from penstock.bench.report import BenchReport
from penstock.core import log
from penstock.core.errors import ConfigError
from penstock.sim.report import latencies_s
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
    part: int
    workload: Workload
    rate_per_s: float
    examples: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="in Mooncake's format (default: synthetic chats)")
    add("--requests", type=int, default=3000, metavar="N", help="of a part (default %(default)s)")
    add("--rate", type=float, default=5.5, metavar="R", help="requests per second (default %(default)s)")
    add(
        "--parts",
        type=int,
        default=4,
        metavar="N",
        help="of the trace, one after the other (default %(default)s)",
    )
    add_simulations(parser)


def run(options: argparse.Namespace) -> BenchReport:
    """Simulate every tier without and with prefetches.

    Raises:
        ConfigError: an option or file is wrong.
    """
    expect_at_least(options, requests=1, parts=1, jobs=1)
    if not options.rate > 0:
        raise ConfigError(f"--rate: must be > 0, got {options.rate:g}")
    requests, parts = (300, 2) if options.quick else (options.requests, options.parts)
    name = SYNTHETIC if options.trace is None else RECORDED
    cells = [
        _Cell(
            tier,
            mode,
            part,
            Workload(name, requests, options.trace, part * requests),
            options.rate,
            options.examples,
        )
        for tier, part, mode in product(TIERS, range(parts), PREFETCH)
    ]
    samples: dict[str, list[float]] = {}
    with get_context("spawn").Pool(min(options.jobs, len(cells))) as pool:
        for cell, figures in zip(cells, pool.imap(_simulate, cells), strict=True):
            print(
                f"{cell.tier} {cell.mode}, part {cell.part}: TTFT {figures['ttft_mean_s']:.3f} s",
                file=sys.stderr,
                flush=True,
            )
            for name, value in figures.items():
                samples.setdefault(f"{name} {cell.tier} {cell.mode}", []).append(value)
    return BenchReport(
        name="kv-prefetch",
        config={
            "deployment": DEPLOYMENT,
            "tiers": TIERS,
            "prefetch": PREFETCH["with"],
            "trace": None if options.trace is None else options.trace.name,
            "requests": requests,
            "rate_per_s": options.rate,
            "parts": parts,
            "quick": options.quick,
        },
        figures=judge(samples),
        samples=samples,
        problems=[name for name, each in samples.items() if name.startswith("failed") and any(each)],
    )


def judge(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Give the mean of each figure over the parts, and how much TTFT changes with prefetches: mean, least and most of a part."""
    figures = {name: float(np.mean(each)) for name, each in samples.items()}
    for tier, metric in product(TIERS, ("ttft_mean_s", "ttft_p90_s", "reusing_ttft_mean_s")):
        without, with_it = (np.asarray(samples[f"{metric} {tier} {mode}"]) for mode in PREFETCH)
        changes = with_it / without - 1
        figures[f"{metric} {tier} change"] = float(with_it.mean() / without.mean() - 1)
        figures[f"{metric} {tier} change_least"], figures[f"{metric} {tier} change_most"] = (
            float(changes.min()),
            float(changes.max()),
        )
    return figures


def _simulate(cell: _Cell) -> dict[str, float]:
    log.configure("warning", process="kv-prefetch")
    settings = (
        f"roles.aggregated.kv.{cell.tier}={TIERS[cell.tier]}",
        f"roles.aggregated.kv.prefetch={PREFETCH[cell.mode]}",
    )
    deployment = find_graph(cell.examples, DEPLOYMENT, settings).deployment()
    made = cell.workload.sessions(cell.rate_per_s, 1 + cell.part)
    deployment.check(made)
    recording = simulate(deployment, made, seed=1)
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
