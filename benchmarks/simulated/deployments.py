"""Throughput of models on several kinds of hardware at latency targets: simulated at the largest goodput, and calculated."""

import argparse
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.simulated.curves import TTFT_S, USER_TOKENS_PER_S, curves
from benchmarks.simulated.goodput import Search
from benchmarks.simulated.systems import SIMULATED, System
from penstock.bench.report import Report
from penstock.core import log
from penstock.core.errors import ConfigError
from penstock.graph import Slo
from penstock.perf.search.demand import Demand
from penstock.perf.search.search import Layout
from penstock.plan.answer import Answer, find_answer
from penstock.plan.graph_text import graph_of
from penstock.plan.processes import Processes
from penstock.plan.report import name_layout
from penstock.plan.trial import Effort, Proposal
from penstock.sim.deployment import plan_deployment
from penstock.sim.workload.workload import WorkloadConfig

_INPUT_TOKENS, _OUTPUT_TOKENS, _QUICK_OUTPUT_TOKENS = 2048, 512, 32
_SLOS = {"fast": Slo(ttft_s=2.0, itl_s=0.02), "interactive": Slo(ttft_s=2.0, itl_s=0.05)}
"""The strictest first: a layout that keeps it keeps the next."""
_SCALED = ("8b-h100", "70b-h100", "671b-h100")
_SCALES = (8, 16, 32)
_SHARED_TOKENS, _PREFIX_GROUPS = 1024, 64
_CURVES = "curves"
_EFFORT = Effort(requests=1000, precision=0.08, step=1.15, layouts=3, requests_max=10_000_000)
_SEARCH = Search(precision=0.06, step=1.12, requests_min=1000)
_QUICK_EFFORT = Effort(requests=60, precision=0.5, step=1.5, layouts=1, begin=0.6)
_QUICK_SEARCH = Search(precision=0.5, requests_min=60, requests_max=60)
_QUICK_SYSTEMS = ("8b-h100",)
_QUICK_CURVES: dict[str, Any] = {"targets": USER_TOKENS_PER_S[::6], "devices_max": 64}
_HOUR_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        default="",
        metavar="PREFIX",
        help="only the systems whose name begins so, as 671b or 8b-h100, or only the calculated curves",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes that simulate (default: all cores, at most 8)"
    )
    parser.add_argument("--no-scales", action="store_true", help="leave out the goodput by number of GPUs")


def run(options: argparse.Namespace) -> Report:
    """Simulate each system at each target, each scale, and calculate the curves.

    Raises:
        ConfigError: no system begins with `--only`.
    """
    names = [system.name for system in SIMULATED if system.name.startswith(options.only)]
    with_curves = _CURVES.startswith(options.only)
    if not names and not with_curves:
        known = ", ".join(system.name for system in SIMULATED)
        raise ConfigError(f"--only: no system begins with {options.only!r}; known: {known}, {_CURVES}")
    if options.quick:
        names = [name for name in names if name in _QUICK_SYSTEMS] or names[:1]
    log.configure("error", process="bench")
    with Processes(options.jobs) as processes:
        bench = (
            _Bench(processes, _QUICK_EFFORT, _QUICK_SEARCH, _QUICK_OUTPUT_TOKENS)
            if options.quick
            else _Bench(processes, _EFFORT, _SEARCH, _OUTPUT_TOKENS)
        )
        for system in SIMULATED:
            if system.name in names:
                bench.simulate(system)
                if system.name in _SCALED and not options.no_scales:
                    bench.scale(system, _SCALES[:1] if options.quick else _SCALES)
    samples: dict[str, list[float]] = {}
    if with_curves:
        samples, curve_layouts = curves(**_QUICK_CURVES if options.quick else {})
        bench.layouts.update(curve_layouts)
    return Report(
        name="deployments",
        config={
            "input_tokens": _INPUT_TOKENS,
            "output_tokens": bench.output_tokens,
            "slos": {name: slo.model_dump() for name, slo in _SLOS.items()},
            "shared_tokens_scaled": _SHARED_TOKENS,
            "prefix_groups_scaled": _PREFIX_GROUPS,
            "curve_ttft_s": TTFT_S,
            "layouts": bench.layouts,
            "gpus": {system.name: system.devices for system in SIMULATED},
            "hardware": {
                entry.name: {"watts": entry.watts, "usd_per_hour": entry.usd_per_hour, "source": entry.source}
                for entry in {system.hardware_name: system.hardware for system in SIMULATED}.values()
            },
            "quick": options.quick,
        },
        figures=bench.figures,
        samples=samples,
    )


@dataclass(slots=True)
class _Bench:
    processes: Processes
    effort: Effort
    search: Search
    output_tokens: int
    figures: dict[str, float] = field(default_factory=dict)
    layouts: dict[str, str | list[str]] = field(default_factory=dict)
    best: dict[tuple[str, str], Layout] = field(default_factory=dict)
    """By system and kind, at the laxest target."""

    def simulate(self, system: System) -> None:
        """Simulate the most promising layouts of each kind; the search goes on from those that keep a stricter target."""
        kept: dict[str, Proposal] = {}
        for name, slo in _SLOS.items():
            question = system.ask(self._demand(slo))
            try:
                answer = find_answer(question, self.processes, effort=self.effort, kept=list(kept.values()))
            except ConfigError:  # no layout keeps the targets
                answer = Answer(question, ())
            for kind in ("aggregated", "disaggregated"):
                best = answer.best_of(disaggregated=kind == "disaggregated")
                if best is not None:
                    kept[kind] = best
                    self.best[system.name, kind] = best.layout
                self._note(f"{system.name}_{name}_{kind}", system, best)

    def scale(self, system: System, scales: tuple[int, ...]) -> None:
        """Give the goodput of aggregated workers by number of devices; half of each prompt is one of 64 shared prefixes."""
        (role_layout,) = self.best[system.name, "aggregated"].role_layouts
        slo = _SLOS["interactive"]
        for devices in scales:
            if devices < role_layout.parallel.devices:
                continue
            workers = replace(role_layout, workers=devices // role_layout.parallel.devices)
            layout = replace(self.best[system.name, "aggregated"], role_layouts=(workers,))
            deployment = plan_deployment(
                graph_of(system.ask(self._demand(slo), devices=devices), layout), beside=Path()
            )
            start_per_s = layout.rate_per_s * devices / system.devices
            found = self.search.largest(deployment, self._half_shared, slo, start_per_s)
            key = f"{system.name}_goodput_rps_per_gpu_x{devices}"
            self.figures[key] = found.good_per_s / devices
            _tell(f"{key}: {self.figures[key]:.3f} requests/s a GPU")

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

    def _half_shared(self, requests: int, rate_per_s: float) -> WorkloadConfig:
        return WorkloadConfig(
            requests=requests,
            rate_per_s=rate_per_s,
            input_tokens=_INPUT_TOKENS - _SHARED_TOKENS,
            output_tokens=self.output_tokens,
            shared_prefix_tokens=_SHARED_TOKENS,
            prefix_groups=_PREFIX_GROUPS,
        )

    def _demand(self, slo: Slo) -> Demand:
        return Demand(
            input_tokens=_INPUT_TOKENS, output_tokens=self.output_tokens, ttft_s=slo.ttft_s, itl_s=slo.itl_s
        )


def _tell(text: str) -> None:
    print(f"benchmarks deployments: {text}", file=sys.stderr)
