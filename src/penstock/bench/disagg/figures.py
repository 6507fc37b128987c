"""The figures of a report: both sides, the curve of the aggregated one, and what a hand-over costs."""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.bench.disagg.choice import Point
from penstock.bench.disagg.measured import Measured, Times

_SAMPLES_MAX = 4000


def point_of(chunk: int, measured: Measured) -> Point:
    return Point(
        chunk=chunk,
        itl_p99_ms=_ms(measured.itl_s, 99),
        ttft_p99_ms=_ms(measured.ttft_s, 99),
        output_tokens_per_s=measured.output_tokens_per_s,
    )


def compared(apart: Measured, together: Measured) -> dict[str, float]:
    """Give both sides' figures and their ratios; `together` is the aggregated workers' best."""
    figures = _of_side("aggregated", together) | _of_side("disaggregated", apart)
    figures["itl_p99_ratio"] = figures["itl_p99_ms_aggregated"] / figures["itl_p99_ms_disaggregated"]
    figures["output_tokens_ratio"] = apart.output_tokens_per_s / together.output_tokens_per_s
    return figures


def curve(points: Sequence[Point]) -> dict[str, float]:
    return {
        f"{name}_aggregated_c{point.chunk}": getattr(point, name)
        for point in points
        for name in ("itl_p99_ms", "ttft_p99_ms", "output_tokens_per_s")
    }


def hand_over(apart: Measured, moved_bytes: int, memcpy_bytes_per_s: float) -> dict[str, float]:
    """Give how much later second tokens come than further ones do, and what copying the KV by one thread takes."""
    quiet_ms, memcpy_ms = _ms(apart.quiet_hand_over_s, 50), moved_bytes / memcpy_bytes_per_s * 1e3
    return {
        "hand_over_ms": quiet_ms,
        "hand_over_ms_p50_loaded": _ms(apart.hand_over_s, 50),
        "hand_over_ms_p99_loaded": _ms(apart.hand_over_s, 99),
        "hand_over_bytes": moved_bytes,
        "hand_over_memcpy_ms": memcpy_ms,
        "hand_over_over_memcpy": quiet_ms / memcpy_ms,
    }


def samples_of(sides: Mapping[str, Measured]) -> dict[str, list[float]]:
    """Give the latencies of each side; of many, every so-manieth in the order of their size."""
    return {
        f"{name}_{side}": _thinned(values)
        for side, measured in sides.items()
        for name, values in (("itl_s", measured.itl_s), ("ttft_s", measured.ttft_s))
    }


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _of_side(name: str, side: Measured) -> dict[str, float]:
    return {
        f"itl_p99_ms_{name}": _ms(side.itl_s, 99),
        f"output_tokens_per_s_{name}": side.output_tokens_per_s,
        f"ttft_p99_ms_{name}": _ms(side.ttft_s, 99),
        f"itl_p50_ms_{name}": _ms(side.itl_s, 50),
        f"itl_p999_ms_{name}": _ms(side.itl_s, 99.9),
        f"itl_max_ms_{name}": _ms(side.itl_s, 100),
        f"ttft_p50_ms_{name}": _ms(side.ttft_s, 50),
        f"prompts_itl_p99_ms_{name}": _ms(side.prompt_itl_s, 99),
        f"prompts_{name}": len(side.ttft_s),
        f"prompts_waiting_at_end_{name}": side.waiting,
    }


def _thinned(values: Times) -> list[float]:
    step = -(-len(values) // _SAMPLES_MAX) or 1
    return [round(float(value), 6) for value in np.sort(values)[::-1][::step][::-1]]


def _ms(seconds: Times, percentile: float) -> float:
    return float(np.percentile(seconds, percentile)) * 1e3 if len(seconds) else 0.0
