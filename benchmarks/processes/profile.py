"""Prediction errors of `penstock profile` for the paged engine and its demo model, at held-out points."""

import argparse
import asyncio
import statistics
import time
from dataclasses import replace

from penstock.bench.report import BenchReport
from penstock.core.errors import ConfigError
from penstock.perf.profile import Latency
from penstock.profiling.profiler import ProfileRequest, make_profile
from penstock.profiling.sweep import QUICK, SweepConfig

_ERROR_WANTED = 0.15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="M", help="a checkpoint's directory or hub name (default: demo)")
    parser.add_argument("--repeats", type=int, metavar="N", help="of each cell, as for penstock profile")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and held-out points (default 0)")


def run(options: argparse.Namespace) -> BenchReport:
    """Profile, and compare with the held-out points.

    Raises:
        ConfigError: the engine's packages are not installed, or an option makes no sense.
    """
    config = replace(QUICK if options.quick else SweepConfig(), seed=options.seed)
    if options.repeats is not None:
        if options.repeats < 1:
            raise ConfigError(f"--repeats: must be >= 1, got {options.repeats}")
        config = replace(config, repeats=options.repeats)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    profile = asyncio.run(make_profile(ProfileRequest("paged", options.model), config))
    wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    evaluation = profile.evaluation
    assert evaluation is not None, "judged"
    figures: dict[str, float] = {}
    samples: dict[str, list[float]] = {}
    for latency in Latency:
        points = [point for point in evaluation.held_out if point.latency is latency]
        errors = [abs(point.error) for point in points]
        figures[f"profile_{latency}_median_error"] = statistics.median(errors)
        figures[f"profile_{latency}_largest_error"] = max(errors)
        samples[f"{latency}_measured_s"] = [point.measured_s for point in points]
        samples[f"{latency}_predicted_s"] = [point.predicted_s for point in points]
    samples["fit_errors"] = [cell.error for cell in evaluation.cells]
    samples["left_out_errors"] = [e for cell in evaluation.cells if (e := cell.left_out_error) is not None]
    figures |= {
        "profile_fit_median_error": statistics.median(map(abs, samples["fit_errors"])),
        "profile_left_out_median_error": statistics.median(map(abs, samples["left_out_errors"])),
        "profile_cells": len(evaluation.cells),
        "profile_s": wall_s,
        "profile_cpu_share": cpu_s / wall_s,
    }
    problems = [
        f"{latency.upper()}: median error {error:.1%} at held-out points, expected below {_ERROR_WANTED:.0%}"
        for latency in Latency
        if (error := figures[f"profile_{latency}_median_error"]) >= _ERROR_WANTED
    ]
    return BenchReport(
        name="profile",
        config={
            "engine": profile.engine,
            "engine_version": profile.engine_version,
            "model": profile.model,
            "hardware": profile.hardware,
            "prompt_tokens": config.prompt_tokens,
            "contexts": config.contexts,
            "batches": config.batches,
            "repeats": config.repeats,
            "held_out": config.held_out,
            "seed": config.seed,
            "quick": options.quick,
        },
        figures=figures,
        samples=samples,
        problems=[] if options.quick else problems,
    )
