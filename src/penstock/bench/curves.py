"""Throughput over interactivity: what a device yields while every user gets so many tokens a second, calculated."""

from penstock.bench.systems import CALCULATED, System
from penstock.perf.placement import Demand, Placement, place_aggregated, place_decode, place_prefill

WORKLOADS = {"1k_1k": (1024, 1024), "8k_1k": (8192, 1024)}
"""Prompt and answer tokens."""
TTFT_S = 5.0
USER_TOKENS_PER_S = (10, 20, 30, 40, 50, 60, 75, 90, 100, 110, 125, 150, 175)


def curves(
    targets: tuple[int, ...] = USER_TOKENS_PER_S,
) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Give tokens per second and device, and the placements, for each target of tokens per second and user.

    Each is the better of whole requests and prefill apart from decode; 0 and "" where neither reaches the target.
    """
    samples = {"curve_tokens_per_s_per_user": [float(target) for target in targets]}
    placements = {}
    for workload, (input_tokens, output_tokens) in WORKLOADS.items():
        for system in CALCULATED:
            points = _curve(system, input_tokens, output_tokens, targets)
            samples[f"curve_{workload}_{system.name}_tokens_per_s_per_gpu"] = [value for value, _ in points]
            placements[f"curve_{workload}_{system.name}"] = [text for _, text in points]
    return samples, placements


def describe(placement: Placement) -> str:
    """Word a placement for people."""
    parallel = placement.parallel
    parts = (("tp", parallel.tp), ("pp", parallel.pp), ("dp", parallel.dp), ("ep", parallel.ep))
    degrees = [f"{name}{degree}" for name, degree in parts if degree > 1] or ["tp1"]
    return f"{' '.join(degrees)} batch {placement.batch}"


def _curve(
    system: System, input_tokens: int, output_tokens: int, targets: tuple[int, ...]
) -> list[tuple[float, str]]:
    choices = system.choices()
    demands = [
        Demand(input_tokens=input_tokens, output_tokens=output_tokens, ttft_s=TTFT_S, itl_s=1 / target)
        for target in targets
    ]
    prefill = place_prefill(system.price, choices, demands[0])
    points = []
    for demand in demands:
        whole = place_aggregated(system.price, choices, demand)
        decode = place_decode(system.price, choices, demand)
        found = [(whole.device_s_per_request, describe(whole))] if whole else []
        if prefill and decode:
            device_s = prefill.device_s_per_request + decode.device_s_per_request
            share = prefill.device_s_per_request / device_s
            found.append((device_s, f"{share:.0%} prefill {describe(prefill)}; decode {describe(decode)}"))
        device_s, text = min(found, default=(0.0, ""))
        points.append((output_tokens / device_s if found else 0.0, text))
    return points
