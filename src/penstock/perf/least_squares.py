"""Non-negative least squares, for step times as sums of non-negative costs."""

from collections.abc import Sequence

import numpy as np


def num_pairs(new: int, cached: int) -> float:
    """Count (new token, attended token) pairs of a causal prompt."""
    return new * cached + new * (new + 1) / 2


def fit_non_negative(rows: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Fit coefficients >= 0 by least squares of the relative error.

    Drops the term with the most negative coefficient until none is negative.

    Args:
        rows: one tuple of terms per measurement.
        seconds: the measurements.

    Returns:
        One coefficient per term.
    """
    design = np.array(rows) / np.array(seconds)[:, None]
    scale = np.abs(design).max(axis=0)
    scale[scale == 0] = 1
    terms = np.zeros(design.shape[1])
    kept = list(range(design.shape[1]))
    while kept:
        solution = np.linalg.lstsq(design[:, kept] / scale[kept], np.ones(len(rows)), rcond=None)[0]
        if solution.min() >= 0:
            terms[kept] = solution / scale[kept]
            break
        kept.pop(int(solution.argmin()))
    return tuple(terms.tolist())
