"""Throughput over interactivity, calculated: tokens per second and device by tokens per second and user."""

from benchmarks.simulated.systems import CALCULATED, System
from penstock.core.errors import ConfigError
from penstock.perf.search.demand import Demand
from penstock.perf.search.search import Layout
from penstock.plan.report import name_layout

WORKLOADS = {"1k_1k": (1024, 1024), "8k_1k": (8192, 1024)}
"""Prompt and answer tokens."""
TTFT_S = 5.0
USER_TOKENS_PER_S = (10, 20, 30, 50, 75, 90, 100, 125, 150)


def curves(
    targets: tuple[int, ...] = USER_TOKENS_PER_S, devices_max: int | None = None
) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Give tokens per second and device, and the layouts, for each target of tokens per second and user.

    Each is the better of aggregated and disaggregated workers; 0 and "" where neither keeps the target.
    Systems of more than `devices_max` devices are left out.
    """
    samples = {"curve_tokens_per_s_per_user": [float(target) for target in targets]}
    layouts = {}
    for workload, (input_tokens, output_tokens) in WORKLOADS.items():
        for system in CALCULATED:
            if devices_max is not None and system.devices > devices_max:
                continue
            points = _curve(system, input_tokens, output_tokens, targets)
            samples[f"curve_{workload}_{system.name}_tokens_per_s_per_gpu"] = [value for value, _ in points]
            layouts[f"curve_{workload}_{system.name}"] = [text for _, text in points]
    return samples, layouts


def _curve(
    system: System, input_tokens: int, output_tokens: int, targets: tuple[int, ...]
) -> list[tuple[float, str]]:
    """Search from the strictest target to the laxest; a layout that keeps one target keeps the next."""
    points: list[tuple[float, str]] = []
    for target in sorted(targets, reverse=True):
        demand = Demand(
            input_tokens=input_tokens, output_tokens=output_tokens, ttft_s=TTFT_S, itl_s=1 / target
        )
        layout = _best(system, demand)
        rate_per_s = layout.rate_per_s * output_tokens / system.devices if layout else 0.0
        found = rate_per_s, name_layout(layout) if layout else ""
        points.append(max(found, points[-1]) if points else found)
    return points[::-1]


def _best(system: System, demand: Demand) -> Layout | None:
    try:
        search = system.ask(demand).search()
    except ConfigError:  # it does not fit on so many devices
        return None
    found = [*search.aggregated()[:1], *search.disaggregated()[:1]]
    return max(found, key=lambda layout: layout.rate_per_s, default=None)
