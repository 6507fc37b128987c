"""Wall time of the command `penstock plan` with all its outputs, beside the latency model's search alone."""

import argparse
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import msgspec

from penstock.bench.report import BenchReport
from penstock.core.errors import Unavailable
from penstock.perf.hardware import find_hardware
from penstock.perf.pool import Demand
from penstock.plan.question import Question

_TARGET_S = 30.0
"""For the first case of a whole run. A quick run does not check the time."""
_KINDS = "aggregated", "disaggregated"
_RUNS = 3
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class _Case:
    """The arguments of one plan."""

    model: str
    hardware: str
    devices: int
    input_tokens: int
    output_tokens: int
    ttft_s: float
    itl_s: float
    formats: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.model}_{self.hardware}_x{self.devices}"

    def arguments(self) -> list[str]:
        flags = {
            "--hardware": self.hardware,
            "--gpus": self.devices,
            "--isl": self.input_tokens,
            "--osl": self.output_tokens,
            "--slo-ttft": self.ttft_s,
            "--slo-itl": self.itl_s,
        } | {f"--{name.replace('_', '-')}": dtype for name, dtype in self.formats}
        return [self.model, *(str(part) for flag in flags.items() for part in flag)]

    def question(self) -> Question:
        demand = Demand(
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            ttft_s=self.ttft_s,
            itl_s=self.itl_s,
        )
        hardware = find_hardware(self.hardware)
        return Question(
            model=self.model,
            hardware=hardware,
            devices=self.devices,
            demand=demand,
            formats=dict(self.formats),
        )


_CASES = (
    _Case("llama-3.1-70b", "h100", 16, 3000, 150, 1.0, 0.03),
    _Case("llama-3.1-8b", "h100", 8, 2000, 300, 1.0, 0.02),
    _Case("gpt-oss-120b", "h100", 8, 4000, 500, 1.0, 0.015),
    _Case("deepseek-r1", "h100", 32, 2048, 256, 2.0, 0.05, (("weight_dtype", "fp8"),)),
)
_QUICK_CASE = _Case("llama-3.1-8b", "h100", 1, 2000, 100, 1.0, 0.02)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Wall time, and the largest requests per second by kind of layout; 0 if none keeps the targets."""

    took_s: float
    requests_per_s: dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the cases are fixed."""


def run(options: argparse.Namespace) -> BenchReport:
    """Plan several times, each time in a new process.

    Raises:
        Unavailable: a plan failed, or took minutes.
    """
    cases, runs = ((_QUICK_CASE,), 1) if options.quick else (_CASES, _RUNS)
    figures: dict[str, float] = {}
    samples: dict[str, list[float]] = {}
    limits: dict[str, float] = {}
    for case in cases:
        plans = [_plan(case) for _ in range(runs)]
        took_s = samples[f"plan_s_{case.name}"] = [plan.took_s for plan in plans]
        figures[f"plan_s_{case.name}"] = statistics.median(took_s)
        for kind in _KINDS:
            figures[f"{kind}_requests_per_s_{case.name}"] = plans[0].requests_per_s[kind]
        limits[f"search_s_{case.name}"], figures[f"layouts_{case.name}"] = _search(case)
    first_s = figures[f"plan_s_{cases[0].name}"]
    is_slow = first_s >= _TARGET_S and not options.quick
    return BenchReport(
        name="plan",
        config={
            "commands": {case.name: case.arguments() for case in cases},
            "runs": runs,
            "quick": options.quick,
        },
        figures=figures,
        samples=samples,
        limits=limits,
        problems=[f"the first plan took {first_s:.1f} s, expected less than {_TARGET_S:g}"]
        if is_slow
        else [],
    )


def _plan(case: _Case) -> _Plan:
    """Run the command with all its outputs."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        names = {"--out": "graph.yaml", "--plot": "plan.html", "--json": "plan.json"}
        outs = [part for flag, name in names.items() for part in (flag, str(Path(directory, name)))]
        command = [sys.executable, "-m", "penstock", "plan", *case.arguments(), *outs]
        began_s = perf_counter()
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"the plan of {case.name} took more than {_TIMEOUT_S:g} s") from error
        took_s = perf_counter() - began_s
        if done.returncode:
            raise Unavailable(
                f"the plan of {case.name} ended with {done.returncode}: {done.stderr.strip()[-500:]}"
            )
        found = msgspec.json.decode(Path(directory, names["--json"]).read_bytes())
    best = dict.fromkeys(_KINDS, 0.0)
    for layout in found["layouts"]:
        best[layout["kind"]] = max(best[layout["kind"]], layout["requests_per_s"])
    return _Plan(took_s, best)


def _search(case: _Case) -> tuple[float, int]:
    """Give the seconds of the latency model's search alone, and the number of layouts that it finds."""
    began_s = perf_counter()
    search = case.question().search()
    layouts = len(search.aggregated()) + len(search.disaggregated())
    return perf_counter() - began_s, layouts
