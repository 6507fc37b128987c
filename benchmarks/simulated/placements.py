"""Aggregated against disaggregated workers: the best layout of each kind, simulated, by target and number of devices."""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from penstock.bench.report import BenchReport
from penstock.perf.hardware import find_hardware
from penstock.perf.model_shape import Parallel
from penstock.perf.pool import Demand
from penstock.perf.roofline import Factors, Roofline
from penstock.plan.answer import PlanAnswer, find_answer
from penstock.plan.question import Question
from penstock.plan.report import name_layout
from penstock.plan.trial import Effort, Processes, Proposal

_MODEL, _HARDWARE, _FORMATS = "llama-3.1-70b", "h100", {"weight_dtype": "fp8"}
_MAIN = Demand(input_tokens=3000, output_tokens=150, ttft_s=1.0, itl_s=0.03)
_ITL_MS = (12, 15, 20, 40, 60)
_TTFT_MS = (500, 2000)
_DEVICES = (8, 16)
_EFFORT = Effort(requests=1500, precision=0.02, step=1.04, layouts=4, requests_max=500_000)
_SWEEP = Effort(requests=600, precision=0.04, step=1.07, layouts=2, requests_max=500_000)
_QUICK = Effort(requests=150, precision=0.2, step=1.3, layouts=1)
_SLOWER = Factors(
    gemm=0.64,
    gemm_narrow=0.52,
    gemm_half_rows=33.0,
    attention=0.55,
    bandwidth=0.78,
    kv_bandwidth=0.62,
    all_reduce_bandwidth=0.46,
    all_reduce_s=4.8e-6,
    all_reduce_ramp_s=3.3e-6,
    collective_bandwidth=0.50,
    collective_s=18e-6,
    attention_s=8e-6,
    layer_s=44e-6,
    step_s=0.32e-3,
)
"""Each factor is a seventh to a half worse than the fitted one, unevenly, so that no single correction compensates:
steps of the 70B model in fp8 on H100, tp 1 to 8, batches of 1 to 256 and contexts of 64 to 32,768, take 1.2 to 1.4 times as long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes that simulate (default: all cores, at most 8)"
    )


def run(options: argparse.Namespace) -> BenchReport:
    """Find the best layouts at each target.

    Raises:
        ConfigError: an option is wrong.
    """
    found = _Found()
    with Processes(options.jobs) as processes:
        for devices in _DEVICES[:1] if options.quick else _DEVICES:
            for demand in _demands(quick=options.quick):
                effort = _QUICK if options.quick else _EFFORT if demand == _MAIN else _SWEEP
                kept = list(found.stricter(devices, demand))
                found.add(find_answer(_ask(devices, demand), processes, effort=effort, kept=kept))
    return BenchReport(
        name="placements",
        config={
            "model": _MODEL,
            "hardware": _HARDWARE,
            "formats": _FORMATS,
            "input_tokens": _MAIN.input_tokens,
            "output_tokens": _MAIN.output_tokens,
            "percentile": _MAIN.percentile,
            "requests": {"at 1 s and 30 ms": _EFFORT.requests, "elsewhere": _SWEEP.requests},
            "layouts": found.layouts,
            "quick": options.quick,
        },
        figures=found.figures | dict(_parts()),
        samples=found.samples(),
    )


@dataclass(slots=True)
class _Found:
    """Rates by devices, target and kind; 0 if no layout keeps the targets."""

    figures: dict[str, float] = field(default_factory=dict)
    layouts: dict[str, list[str]] = field(default_factory=dict)
    """Simulated layouts by target and kind, the best first."""
    rates: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)
    """By devices and targets in ms: requests per second and device, aggregated and disaggregated."""
    answers: list[PlanAnswer] = field(default_factory=list)

    def stricter(self, devices: int, demand: Demand) -> Iterator[Proposal]:
        """Yield the best simulated layouts of each stricter target: they keep this target, too."""
        for answer in self.answers:
            asked = answer.question.demand
            if (
                answer.question.devices == devices
                and asked.ttft_s <= demand.ttft_s
                and asked.itl_s <= demand.itl_s
            ):
                for is_disaggregated in (False, True):
                    best = answer.best_of(disaggregated=is_disaggregated)
                    if best is not None and best.is_simulated:
                        yield best

    def add(self, answer: PlanAnswer) -> None:
        self.answers.append(answer)
        question, demand = answer.question, answer.question.demand
        targets = round(1e3 * demand.ttft_s), round(1e3 * demand.itl_s)
        key = f"x{question.devices}_ttft{targets[0]}ms_itl{targets[1]}ms"
        rates = []
        for kind, is_disaggregated in (("aggregated", False), ("disaggregated", True)):
            best = answer.best_of(disaggregated=is_disaggregated)
            rate = 0.0 if best is None else best.seen.rate_per_s / question.devices
            self.figures[f"{kind}_rps_per_gpu_{key}"] = rate
            self.layouts[f"{kind}_{key}"] = [
                _say(proposal)
                for proposal in answer.proposals
                if proposal.layout.is_disaggregated is is_disaggregated
            ]
            rates.append(rate)
        aggregated, disaggregated = rates
        if aggregated:
            self.figures[f"ratio_{key}"] = disaggregated / aggregated
            self.figures[f"ratio_slower_{key}"] = _ratio(question, _SLOWER)
        self.rates[question.devices, *targets] = aggregated, disaggregated
        _tell(f"{key}: {aggregated:.3f} aggregated, {disaggregated:.3f} disaggregated")

    def samples(self) -> dict[str, list[float]]:
        """Give the sweeps over the ITL target, at the main TTFT target."""
        samples: dict[str, list[float]] = {}
        for (devices, ttft_ms, itl_ms), (aggregated, disaggregated) in sorted(self.rates.items()):
            if ttft_ms == round(1e3 * _MAIN.ttft_s):
                samples.setdefault(f"itl_ms_x{devices}", []).append(itl_ms)
                samples.setdefault(f"aggregated_rps_per_gpu_x{devices}", []).append(aggregated)
                samples.setdefault(f"disaggregated_rps_per_gpu_x{devices}", []).append(disaggregated)
        return samples


def _demands(*, quick: bool) -> list[Demand]:
    """List the targets, each after all stricter ones."""
    if quick:
        return [_MAIN]
    varied = [replace(_MAIN, itl_s=itl_ms / 1e3) for itl_ms in _ITL_MS]
    varied += [replace(_MAIN, ttft_s=ttft_ms / 1e3) for ttft_ms in _TTFT_MS]
    return sorted([_MAIN, *varied], key=lambda demand: (demand.ttft_s, demand.itl_s))


def _ask(devices: int, demand: Demand) -> Question:
    return Question(
        model=_MODEL, hardware=find_hardware(_HARDWARE), devices=devices, demand=demand, formats=_FORMATS
    )


def _ratio(question: Question, factors: Factors) -> float:
    """Search layouts again for engines of other factors, and predict the ratio; 0 if no aggregated layout keeps the targets."""
    search = question.search()

    def price(parallel: Parallel) -> Roofline:
        return replace(question.price(parallel), factors=factors)

    search.price = price
    aggregated, disaggregated = (
        max((layout.rate_per_s for layout in kind), default=0.0)
        for kind in (search.aggregated(), search.disaggregated())
    )
    return disaggregated / aggregated if aggregated else 0.0


def _parts() -> Iterator[tuple[str, float]]:
    """Give step times that explain the ratio: prompts in steps of several sizes beside 32 streams, and decode steps."""
    question = _ask(8, _MAIN)
    for tp in (2, 4, 8):
        model = question.price(Parallel(tp=tp))
        yield f"prompt_gpu_s_tp{tp}_alone", tp * model.prefill_s(_MAIN.input_tokens)
        context = round(32 * _MAIN.context_tokens)
        yield f"decode_step_ms_tp{tp}_batch32", 1e3 * model.decode_step_s(32, context)
        for tokens in (128, 256, 512, 1024):
            step_s = model.mixed_step_s([(tokens, _MAIN.input_tokens // 2)], 32, context)
            yield f"mixed_step_ms_tp{tp}_{tokens}", 1e3 * step_s
            pieces = math.ceil(_MAIN.input_tokens / tokens)
            yield f"prompt_gpu_s_tp{tp}_{tokens}", tp * pieces * step_s


def _say(proposal: Proposal) -> str:
    seen = proposal.seen
    return (
        f"{name_layout(proposal.layout)}: {seen.rate_per_s:.4g} requests/s, TTFT {seen.ttft_s:.3f} s, TPOT {1e3 * seen.itl_s:.1f} ms,"
        f" predicted {proposal.layout.rate_per_s:.4g} requests/s"
    )


def _tell(text: str) -> None:
    print(f"benchmarks placements: {text}", file=sys.stderr)
