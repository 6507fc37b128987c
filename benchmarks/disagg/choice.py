"""Which chunk size is the aggregated workers' best: the fairest opponent of workers that share the work out."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """How workers did with one `max_batch_tokens`."""

    chunk: int
    itl_p99_ms: float
    itl_p999_ms: float
    itl_max_ms: float
    """The longest stall of a stream."""
    ttft_p99_ms: float
    output_tokens_per_s: float


def best_chunk(points: Sequence[Point], ttft_p99_ms: float) -> Point:
    """Choose the lowest ITL p99 among those whose TTFT p99 does not exceed this; the lowest TTFT p99 where each does.

    Args:
        points: at least one.
        ttft_p99_ms: of the other side.
    """
    within = [point for point in points if point.ttft_p99_ms <= ttft_p99_ms]
    if not within:
        return min(points, key=lambda point: point.ttft_p99_ms)
    return min(within, key=lambda point: point.itl_p99_ms)
