"""The figures of a report: both sides, the curve of the aggregated one, and what a KV transfer costs.

A side has a `Measured` for each turn; the figures are medians over the turns.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.disagg.choice import Point
from benchmarks.disagg.measured import Measured, Times

_SAMPLES_MAX = 4000
_LATE_MS = 50


Turns = Sequence[Measured]


def point_of(chunk: int, turns: Turns) -> Point:
    return Point(
        chunk=chunk,
        itl_p99_ms=_median(turns, lambda turn: _ms(turn.itl_s, 99)),
        itl_p999_ms=_median(turns, lambda turn: _ms(turn.itl_s, 99.9)),
        itl_max_ms=_median(turns, lambda turn: _ms(turn.itl_s, 100)),
        ttft_p99_ms=_median(turns, lambda turn: _ms(turn.ttft_s, 99)),
        output_tokens_per_s=_median(turns, lambda turn: turn.output_tokens_per_s),
    )


def compared(disaggregated: Turns, aggregated: Turns) -> dict[str, float]:
    """Give both sides' figures and their ratios; `aggregated` is the aggregated workers' best."""
    figures = of_side("aggregated", aggregated) | of_side("disaggregated", disaggregated)
    figures["itl_p99_ratio"] = figures["itl_p99_ms_aggregated"] / figures["itl_p99_ms_disaggregated"]
    figures["output_tokens_ratio"] = (
        figures["output_tokens_per_s_disaggregated"] / figures["output_tokens_per_s_aggregated"]
    )
    return figures


def of_side(name: str, turns: Turns) -> dict[str, float]:
    """Give the figures of one side."""

    def median_of(times: Callable[[Measured], Times], percentile: float) -> float:
        return _median(turns, lambda turn: _ms(times(turn), percentile))

    itl, ttft = (lambda turn: turn.itl_s), (lambda turn: turn.ttft_s)
    return {
        f"itl_p99_ms_{name}": median_of(itl, 99),
        f"output_tokens_per_s_{name}": _median(turns, lambda turn: turn.output_tokens_per_s),
        f"ttft_p99_ms_{name}": median_of(ttft, 99),
        f"itl_p50_ms_{name}": median_of(itl, 50),
        f"itl_p999_ms_{name}": median_of(itl, 99.9),
        f"itl_max_ms_{name}": median_of(itl, 100),
        f"itl_over_{_LATE_MS}ms_share_{name}": _median(turns, lambda turn: _share_over(turn.itl_s, _LATE_MS)),
        f"ttft_p50_ms_{name}": median_of(ttft, 50),
        f"prompts_itl_p99_ms_{name}": median_of(lambda turn: turn.prompt_itl_s, 99),
        f"prompts_{name}": sum(len(turn.ttft_s) for turn in turns),
        f"prompts_waiting_at_end_{name}": sum(turn.waiting for turn in turns),
    }


def limits(best: Point, alone: Turns) -> dict[str, float]:
    """Give the ITL p99 of the streams without prompts, and the best chunk's ITL p99 over it."""
    itl_p99_ms = _median(alone, lambda turn: _ms(turn.itl_s, 99))
    return {"itl_p99_ms_alone": itl_p99_ms, "itl_p99_ratio_alone": best.itl_p99_ms / itl_p99_ms}


def curve(points: Sequence[Point]) -> dict[str, float]:
    return {
        f"{name}_aggregated_c{point.chunk}": getattr(point, name)
        for point in points
        for name in ("itl_p99_ms", "itl_p999_ms", "itl_max_ms", "ttft_p99_ms", "output_tokens_per_s")
    }


def kv_transfer(
    quiet_s: Sequence[float], disaggregated: Turns, moved_bytes: int, memcpy_bytes_per_s: float
) -> dict[str, float]:
    """Give how much later second tokens come than further tokens, without load and beside streams."""
    return quiet_kv_transfer(quiet_s, moved_bytes, memcpy_bytes_per_s) | {
        "kv_transfer_ms_p50_loaded": _median(disaggregated, lambda turn: _ms(turn.kv_transfer_s, 50)),
        "kv_transfer_ms_p99_loaded": _median(disaggregated, lambda turn: _ms(turn.kv_transfer_s, 99)),
    }


def quiet_kv_transfer(
    quiet_s: Sequence[float], moved_bytes: int, memcpy_bytes_per_s: float
) -> dict[str, float]:
    """Give the same without load, and the time in which one thread copies the KV."""
    quiet_ms, memcpy_ms = median(quiet_s) * 1e3, moved_bytes / memcpy_bytes_per_s * 1e3
    return {
        "kv_transfer_ms": quiet_ms,
        "kv_transfer_ms_p90": _ms(np.array(quiet_s), 90) if len(quiet_s) else 0.0,
        "kv_transfer_bytes": moved_bytes,
        "kv_transfer_memcpy_ms": memcpy_ms,
        "kv_transfer_over_memcpy": quiet_ms / memcpy_ms,
    }


def kv_transfers(
    summed_s: Sequence[Sequence[float]],
    unsummed_s: Sequence[Sequence[float]],
    moved_bytes: int,
    memcpy_bytes_per_s: float,
) -> dict[str, float]:
    """Compare transfers with and without checksums; the ratio is the median over pairs of turns."""
    ratios = [
        median(with_sums) / median(without) for with_sums, without in zip(summed_s, unsummed_s, strict=True)
    ]
    unsummed = [second for turn in unsummed_s for second in turn]
    return quiet_kv_transfer(
        [second for turn in summed_s for second in turn], moved_bytes, memcpy_bytes_per_s
    ) | {
        "kv_transfer_ms_unsummed": median(unsummed) * 1e3,
        "kv_transfer_ms_p90_unsummed": _ms(np.array(unsummed), 90),
        "kv_transfer_ratio_summed": median(ratios),
    }


def samples_of(sides: Mapping[str, Turns]) -> dict[str, list[float]]:
    """Give the latencies of each side, all turns joined; of many, every n-th in sorted order."""
    return {
        f"{name}_{side}": _thinned(np.concatenate([getattr(turn, name) for turn in turns]))
        for side, turns in sides.items()
        for name in ("itl_s", "ttft_s")
    } | {
        f"itl_p99_ms_{side}_by_turn": [_ms(turn.itl_s, 99) for turn in turns] for side, turns in sides.items()
    }


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _median(turns: Turns, figure: Callable[[Measured], float]) -> float:
    return statistics.median(figure(turn) for turn in turns)


def _thinned(values: Times) -> list[float]:
    step = -(-len(values) // _SAMPLES_MAX) or 1
    return [round(float(value), 6) for value in np.sort(values)[::-1][::step][::-1]]


def _share_over(seconds: Times, milliseconds: float) -> float:
    return float((seconds > milliseconds / 1e3).mean()) if len(seconds) else 0.0


def _ms(seconds: Times, percentile: float) -> float:
    return float(np.percentile(seconds, percentile)) * 1e3 if len(seconds) else 0.0
