"""What models come to on kinds of hardware at latency targets: simulated at the largest goodput, and calculated."""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.bench.arguments import add_directory
from penstock.bench.curves import TTFT_S, USER_TOKENS_PER_S, curves, describe
from penstock.bench.goodput import Goodput, Search
from penstock.bench.report import Report
from penstock.bench.systems import SIMULATED, System
from penstock.core import log
from penstock.core.errors import ConfigError
from penstock.graph import Slo
from penstock.perf.placement import (
    Demand,
    Placement,
    place_aggregated,
    place_decode,
    place_prefill,
)
from penstock.sim.deployment import Deployment
from penstock.sim.workload import WorkloadConfig

_INPUT_TOKENS, _OUTPUT_TOKENS = 2048, 512
_SLOS = {"interactive": Slo(ttft_s=2.0, itl_s=0.05), "fast": Slo(ttft_s=2.0, itl_s=0.02)}
_DEVICES_MIN = 4
"""Workers that run whole requests are simulated on at least so many devices, so that there is something to route."""
_STEP_TOKENS = 8192
"""Prompt tokens a step may compute on each data-parallel rank beside decoding."""
_SCALED = ("8b-h100", "70b-h100", "671b-h100")
_SCALES = (8, 16, 32, 64)
_SHARED_TOKENS, _PREFIX_GROUPS = 1024, 64
_CURVES = "curves"
_QUICK = Search(precision=0.5, requests_min=60, requests_max=60)
_QUICK_SYSTEMS = ("8b-h100", "671b-gb200")
_HOUR_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directory(parser, "--profiles", "examples/profiles", "the engines' reference tables")
    parser.add_argument(
        "--only",
        default="",
        metavar="PREFIX",
        help="only the systems whose name begins so, as 671b or 8b-h100, or only the calculated curves",
    )


def run(options: argparse.Namespace) -> Report:
    """Simulate each system at each target, each scale, and calculate the curves.

    Raises:
        ConfigError: a table is missing, or no system begins with `--only`.
    """
    names = [system.name for system in SIMULATED if system.name.startswith(options.only)]
    with_curves = _CURVES.startswith(options.only)
    if not names and not with_curves:
        known = ", ".join(system.name for system in SIMULATED)
        raise ConfigError(f"--only: no system begins with {options.only!r}; known: {known}, {_CURVES}")
    if options.quick:
        names = [name for name in names if name in _QUICK_SYSTEMS] or names[:1]
    log.configure("error", process="bench")
    with TemporaryDirectory() as scratch:
        bench = _Bench(options.profiles, Path(scratch), _QUICK if options.quick else Search())
        for system in SIMULATED:
            if system.name in names:
                bench.simulate(system)
                if system.name in _SCALED:
                    bench.scale(system, _SCALES[:1] if options.quick else _SCALES)
    samples: dict[str, list[float]] = {}
    if with_curves:
        samples, curve_placements = curves(USER_TOKENS_PER_S[:: 6 if options.quick else 1])
        bench.placements.update(curve_placements)
    return Report(
        name="deployments",
        config={
            "input_tokens": _INPUT_TOKENS,
            "output_tokens": _OUTPUT_TOKENS,
            "slos": {name: slo.model_dump() for name, slo in _SLOS.items()},
            "shared_tokens_scaled": _SHARED_TOKENS,
            "prefix_groups_scaled": _PREFIX_GROUPS,
            "curve_ttft_s": TTFT_S,
            "placements": bench.placements,
            "engines": bench.engines,
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
    profiles: Path
    scratch: Path
    search: Search
    figures: dict[str, float] = field(default_factory=dict)
    placements: dict[str, str | list[str]] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)
    """By row: the table that the engines ran on."""

    def simulate(self, system: System) -> None:
        for name, slo in _SLOS.items():
            demand = _demand(slo)
            whole = place_aggregated(system.price, system.choices(), demand)
            if whole is not None:
                replicas = -(-_DEVICES_MIN // whole.parallel.devices)
                found = self._largest(system, whole, slo, _whole_requests, replicas=replicas)
                self._note(
                    f"{system.name}_{name}_aggregated", system, [whole], _device_s(whole, found, replicas)
                )
            if system.shape.moe is None:
                continue
            prefill = place_prefill(system.price, system.choices(), demand)
            decode = place_decode(system.price, system.choices(), demand)
            if prefill is None or decode is None:
                continue
            prompt_tokens = prefill.batch // prefill.parallel.dp * _INPUT_TOKENS
            prompts = self._largest(system, prefill, slo, _only_prompts, step_tokens=prompt_tokens)
            answers = self._largest(system, decode, slo, _only_answers)
            device_s = _device_s(prefill, prompts, 1) + _device_s(decode, answers, 1)
            key = f"{system.name}_{name}_disaggregated"
            self._note(key, system, [prefill, decode], device_s)
            self.figures[f"{key}_prefill_share"] = _device_s(prefill, prompts, 1) / device_s

    def scale(self, system: System, scales: tuple[int, ...]) -> None:
        """Give the goodput by number of devices, where half of each prompt is one of some common prefixes."""
        slo = _SLOS["interactive"]
        whole = place_aggregated(system.price, system.choices(), _demand(slo))
        assert whole is not None, "of the systems that are scaled"
        search, start_per_s = self.search, system.likely * whole.requests_per_s / whole.parallel.devices
        for devices in scales:
            replicas = devices // whole.parallel.devices
            if not replicas:
                continue
            deployment = self._deploy(system, whole, slo, replicas)
            found = search.largest(deployment, _half_shared, slo, start_per_s * devices)
            if found.rate_per_s:  # much the same is to be expected of the next one
                search = replace(self.search, step=1.06, precision=0.06)
                start_per_s = found.rate_per_s / devices
            key = f"{system.name}_goodput_rps_per_gpu_x{devices}"
            self.engines[key] = system.engines
            self.figures[key] = found.good_per_s / devices
            _tell(f"{system.name} on {devices}: {found.good_per_s / devices:.3f} requests/s a GPU")

    def _largest(
        self,
        system: System,
        placement: Placement,
        slo: Slo,
        workload: Callable[[int, float], WorkloadConfig],
        *,
        replicas: int = 1,
        step_tokens: int = _STEP_TOKENS,
    ) -> Goodput:
        start_per_s = system.likely * replicas * placement.requests_per_s
        deployment = self._deploy(system, placement, slo, replicas, step_tokens)
        return self.search.largest(deployment, workload, slo, start_per_s)

    def _deploy(
        self,
        system: System,
        placement: Placement,
        slo: Slo,
        replicas: int,
        step_tokens: int = _STEP_TOKENS,
    ) -> Deployment:
        graph = system.graph(placement, replicas=replicas, slo=slo, step_tokens=step_tokens)
        return system.deploy(graph, placement.parallel, profiles=self.profiles, scratch=self.scratch)

    def _note(self, key: str, system: System, placements: list[Placement], device_s: float) -> None:
        self.placements[key] = "; ".join(map(describe, placements))
        self.engines[key] = system.engines
        tokens_per_s = _OUTPUT_TOKENS / device_s
        hardware = system.hardware
        self.figures[f"{key}_tokens_per_s_per_gpu"] = tokens_per_s
        self.figures[f"{key}_tokens_per_joule"] = tokens_per_s / hardware.watts
        if tokens_per_s:
            usd = 1e6 * hardware.usd_per_hour / _HOUR_S
            self.figures[f"{key}_usd_per_million_tokens"] = usd / tokens_per_s
        _tell(f"{key}: {tokens_per_s:,.1f} tokens/s a GPU ({self.placements[key]})")


def _whole_requests(requests: int, rate_per_s: float) -> WorkloadConfig:
    return WorkloadConfig(
        requests=requests, rate_per_s=rate_per_s, input_tokens=_INPUT_TOKENS, output_tokens=_OUTPUT_TOKENS
    )


def _half_shared(requests: int, rate_per_s: float) -> WorkloadConfig:
    return WorkloadConfig(
        requests=requests,
        rate_per_s=rate_per_s,
        input_tokens=_INPUT_TOKENS - _SHARED_TOKENS,
        output_tokens=_OUTPUT_TOKENS,
        shared_prefix_tokens=_SHARED_TOKENS,
        prefix_groups=_PREFIX_GROUPS,
    )


def _only_prompts(requests: int, rate_per_s: float) -> WorkloadConfig:
    """What a prefill worker sees."""
    return WorkloadConfig(
        requests=requests, rate_per_s=rate_per_s, input_tokens=_INPUT_TOKENS, output_tokens=1
    )


def _only_answers(requests: int, rate_per_s: float) -> WorkloadConfig:
    """What a decode worker sees: prompts whose KV is there."""
    return WorkloadConfig(
        requests=requests,
        rate_per_s=rate_per_s,
        input_tokens=1,
        output_tokens=_OUTPUT_TOKENS,
        shared_prefix_tokens=_INPUT_TOKENS,
    )


def _demand(slo: Slo) -> Demand:
    return Demand(
        input_tokens=_INPUT_TOKENS, output_tokens=_OUTPUT_TOKENS, ttft_s=slo.ttft_s, itl_s=slo.itl_s
    )


def _device_s(placement: Placement, found: Goodput, replicas: int) -> float:
    """Give the device seconds of a good request."""
    return placement.parallel.devices * replicas / found.good_per_s if found.good_per_s else math.inf


def _tell(text: str) -> None:
    print(f"penstock bench deployments: {text}", file=sys.stderr)  # noqa: T201 - a long run says where it is
