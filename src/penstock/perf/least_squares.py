"""Lines through prices: how a sum of costs, none negative, is found from points."""

from collections.abc import Sequence

import numpy as np


def num_pairs(new: int, cached: int) -> float:
    """Count the pairs of a new token and one that it attends to."""
    return new * cached + new * (new + 1) / 2


def fit_non_negative(rows: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Solve non-negative least squares of the relative error by dropping the most negative term until none is."""
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
