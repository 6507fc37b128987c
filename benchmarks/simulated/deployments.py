"""Throughput of models on several kinds of hardware at latency targets, simulated at the largest rate that keeps them."""

import argparse
import sys
from dataclasses import dataclass, field
from typing import Any

from penstock.bench.report import BenchReport
from penstock.core import log
from penstock.core.errors import ConfigError
from penstock.graph import Slo
from penstock.perf.hardware import Hardware, find_hardware
from penstock.perf.pool import Demand
from penstock.plan.answer import PlanAnswer, find_answer
from penstock.plan.question import Question
from penstock.plan.report import name_layout
from penstock.plan.trial import Effort, Processes, Proposal

_INPUT_TOKENS, _OUTPUT_TOKENS, _QUICK_OUTPUT_TOKENS = 2048, 512, 32
_SLOS = {"fast": Slo(ttft_s=2.0, itl_s=0.02), "interactive": Slo(ttft_s=2.0, itl_s=0.05)}
"""The strictest first: a layout that keeps it keeps the next."""
_EFFORT = Effort(requests=1000, precision=0.08, step=1.15, layouts=3, requests_max=10_000_000)
_QUICK_EFFORT = Effort(requests=60, precision=0.5, step=1.5, layouts=1, begin=0.6)
_QUICK_SYSTEMS = ("8b-h100",)
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A model on devices, and its number formats."""

    name: str
    model: str
    hardware_name: str
    devices: int
    formats: dict[str, str]

    @property
    def hardware(self) -> Hardware:
        return find_hardware(self.hardware_name)

    def ask(self, demand: Demand, *, devices: int | None = None) -> Question:
        """Make the plan's question for a demand.

        Args:
            demand: the requests and their targets.
            devices: the number of devices; None for the system's own.
        """
        return Question(
            model=self.model,
            hardware=self.hardware,
            devices=devices or self.devices,
            demand=demand,
            formats=self.formats,
        )


_FP8 = {"weight_dtype": "fp8", "kv_dtype": "fp8"}
_8B: dict[str, Any] = {"model": "llama-3.1-8b", "formats": {"weight_dtype": "bfloat16"}, "devices": 8}
_70B: dict[str, Any] = {"model": "llama-3.1-70b", "formats": _FP8, "devices": 8}
_HOPPER: dict[str, Any] = {"model": "deepseek-r1", "formats": _FP8}
_BLACKWELL: dict[str, Any] = {"model": "deepseek-r1", "formats": {**_FP8, "expert_dtype": "nvfp4"}}

SIMULATED = (
    System(name="8b-h100", hardware_name="h100", **_8B),
    System(name="8b-gb200", hardware_name="gb200", **_8B),
    System(name="8b-gb300", hardware_name="gb300", **_8B),
    System(name="70b-h100", hardware_name="h100", **_70B),
    System(name="70b-gb200", hardware_name="gb200", **_70B),
    System(name="70b-gb300", hardware_name="gb300", **_70B),
    System(name="671b-h100", hardware_name="h100", devices=32, **_HOPPER),
    System(name="671b-gb200", hardware_name="gb200", devices=32, **_BLACKWELL),
    System(name="671b-gb300", hardware_name="gb300", devices=32, **_BLACKWELL),
)
"""Systems of one model have the same number of devices, from the slowest hardware to the fastest."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        default="",
        metavar="PREFIX",
        help="only the systems whose name begins so, as 671b or 8b-h100",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes that simulate (default: all cores, at most 8)"
    )


def run(options: argparse.Namespace) -> BenchReport:
    """Simulate each system at each target.

    Raises:
        ConfigError: no system begins with `--only`.
    """
    names = [system.name for system in SIMULATED if system.name.startswith(options.only)]
    if not names:
        known = ", ".join(system.name for system in SIMULATED)
        raise ConfigError(f"--only: no system begins with {options.only!r}; known: {known}")
    if options.quick:
        names = [name for name in names if name in _QUICK_SYSTEMS] or names[:1]
    log.configure("error", process="bench")
    with Processes(options.jobs) as processes:
        bench = (
            _Bench(processes, _QUICK_EFFORT, _QUICK_OUTPUT_TOKENS)
            if options.quick
            else _Bench(processes, _EFFORT, _OUTPUT_TOKENS)
        )
        for system in SIMULATED:
            if system.name in names:
                bench.simulate(system)
    return BenchReport(
        name="deployments",
        config={
            "input_tokens": _INPUT_TOKENS,
            "output_tokens": bench.output_tokens,
            "slos": {name: slo.model_dump() for name, slo in _SLOS.items()},
            "layouts": bench.layouts,
            "gpus": {system.name: system.devices for system in SIMULATED},
            "hardware": {
                entry.name: {"watts": entry.watts, "usd_per_hour": entry.usd_per_hour, "source": entry.source}
                for entry in {system.hardware_name: system.hardware for system in SIMULATED}.values()
            },
            "quick": options.quick,
        },
        figures=bench.figures,
    )


@dataclass(slots=True)
class _Bench:
    processes: Processes
    effort: Effort
    output_tokens: int
    figures: dict[str, float] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)

    def simulate(self, system: System) -> None:
        """Simulate the most promising layouts of each kind; the search goes on from those that keep a stricter target."""
        kept: dict[str, Proposal] = {}
        for name, slo in _SLOS.items():
            question = system.ask(self._demand(slo))
            try:
                answer = find_answer(question, self.processes, effort=self.effort, kept=list(kept.values()))
            except ConfigError:  # no layout keeps the targets
                answer = PlanAnswer(question, ())
            for kind in ("aggregated", "disaggregated"):
                best = answer.best_of(disaggregated=kind == "disaggregated")
                if best is not None:
                    kept[kind] = best
                self._note(f"{system.name}_{name}_{kind}", system, best)

    def _note(self, key: str, system: System, best: Proposal | None) -> None:
        rate_per_s = 0.0 if best is None else best.seen.rate_per_s
        tokens_per_s = self.output_tokens * rate_per_s / system.devices
        hardware = system.hardware
        self.figures[f"{key}_tokens_per_s_per_gpu"] = tokens_per_s
        self.figures[f"{key}_tokens_per_joule"] = tokens_per_s / hardware.watts
        self.layouts[key] = ""
        if best is not None:
            usd = 1e6 * hardware.usd_per_hour / _HOUR_S
            self.figures[f"{key}_usd_per_million_tokens"] = usd / tokens_per_s
            self.figures[f"{key}_over_predicted"] = rate_per_s / best.layout.rate_per_s
            self.layouts[key] = name_layout(best.layout)
        _tell(f"{key}: {tokens_per_s:,.1f} tokens/s a GPU ({self.layouts[key]})")

    def _demand(self, slo: Slo) -> Demand:
        return Demand(
            input_tokens=_INPUT_TOKENS, output_tokens=self.output_tokens, ttft_s=slo.ttft_s, itl_s=slo.itl_s
        )


def _tell(text: str) -> None:
    print(f"benchmarks deployments: {text}", file=sys.stderr)
