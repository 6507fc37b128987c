"""Percentiles and ratios of reports."""

import numpy as np
from numpy.typing import NDArray

_PERCENTILES = (50, 90, 99)


def percentiles(values: NDArray[np.float64]) -> dict[str, float | None]:
    """Give `mean`, `p50`, `p90` and `p99`; None for an empty array."""
    found: dict[str, float | None] = {"mean": float(values.mean()) if len(values) else None}
    for percent in _PERCENTILES:
        found[f"p{percent}"] = float(np.percentile(values, percent)) if len(values) else None
    return found


def ratio(numerator: float, denominator: float) -> float | None:
    """Divide; None if the denominator is 0."""
    return numerator / denominator if denominator else None
