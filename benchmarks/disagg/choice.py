"""Choose the aggregated workers' best chunk size, with which disaggregated workers are compared."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Latencies and throughput of one side; `chunk` is its `max_batch_tokens`."""

    chunk: int
    itl_p99_ms: float
    itl_p999_ms: float
    itl_max_ms: float
    """The longest stall of a stream."""
    ttft_p99_ms: float
    output_tokens_per_s: float


def best_chunk(points: Sequence[Point], ttft_p99_ms: float) -> Point:
    """Choose the lowest ITL p99 among the points within a TTFT p99, or the lowest TTFT p99 if no point is within it.

    Args:
        points: at least one.
        ttft_p99_ms: of the disaggregated side.
    """
    within = [point for point in points if point.ttft_p99_ms <= ttft_p99_ms]
    if not within:
        return min(points, key=lambda point: point.ttft_p99_ms)
    return min(within, key=lambda point: point.itl_p99_ms)
