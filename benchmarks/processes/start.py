"""Time from the `penstock serve` command to the first answer, its processes' bytecode being compiled and its files cached."""

import argparse
import os
import subprocess
import sys
from time import perf_counter

import numpy as np

from benchmarks.processes.asking import Asker
from benchmarks.processes.served import served
from penstock.bench.report import BenchReport

_STARTS, _QUICK_STARTS = 7, 1
_DEPLOYMENTS = {
    "mock": ("--engine", "mock"),
    "demo": ("--demo",),
    "disaggregated": ("--demo", "--prefill", "1", "--decode", "1"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--starts", type=int, metavar="N", help=f"of each deployment (default {_STARTS})")


def run(options: argparse.Namespace) -> BenchReport:
    count = options.starts or (_QUICK_STARTS if options.quick else _STARTS)
    samples: dict[str, list[float]] = {"import_torch_s": []}
    for flags in _DEPLOYMENTS.values():  # bytecode and page cache
        _start(flags)
    for _ in range(count):
        samples["import_torch_s"].append(_import_torch())
        for name, flags in _DEPLOYMENTS.items():
            for figure, seconds in _start(flags).items():
                samples.setdefault(f"{name}_{figure}", []).append(seconds)
    medians = {name: float(np.median(values)) for name, values in samples.items()}
    return BenchReport(
        name="start",
        config={
            "starts": count,
            "deployments": {name: " ".join(flags) for name, flags in _DEPLOYMENTS.items()},
        },
        figures={name: seconds for name, seconds in medians.items() if name != "import_torch_s"},
        samples=samples,
        limits={"import_torch_s": medians["import_torch_s"]},
    )


def _start(flags: tuple[str, ...]) -> dict[str, float]:
    cpu_s, begin_s = _children_cpu_s(), perf_counter()
    with served(*flags) as deployment:
        ready_s = perf_counter() - begin_s
        Asker(deployment, 4).ask("What is a KV cache?")
        answered_s = perf_counter() - begin_s
    return {"ready_s": ready_s, "answer_s": answered_s, "cpu_s": _children_cpu_s() - cpu_s}


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _import_torch() -> float:
    """Give the seconds in which one process imports what the paged engine is made of: none starts sooner."""
    begin_s = perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, transformers"], check=True)
    return perf_counter() - begin_s
