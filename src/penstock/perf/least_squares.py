"""Non-negative least squares, for step times as sums of non-negative costs."""

from collections.abc import Sequence

import numpy as np


def num_pairs(new: int, cached: int) -> float:
    """Count (new token, attended token) pairs of a causal prompt."""
    return new * cached + new * (new + 1) / 2


def fit_non_negative(
    rows: Sequence[tuple[float, ...]],
    seconds: Sequence[float],
    *,
    weights: Sequence[float] = (),
    ridge: Sequence[float] = (),
) -> tuple[float, ...]:
    """Fit coefficients >= 0 by least squares of the relative error.

    Drops the term with the most negative coefficient until none is negative.

    Args:
        rows: one tuple of terms per measurement.
        seconds: the measurements.
        weights: of the measurements' squared errors; empty: equal ones.
        ridge: by term, the weight of a pull towards 0: of terms that measurements cannot tell apart, those without one explain
            the time. Empty: no term has one.

    Returns:
        One coefficient per term.
    """
    wanted = np.sqrt(weights) if weights else np.ones(len(rows))
    design = np.array(rows) * (wanted / np.array(seconds))[:, None]
    scale = np.abs(design).max(axis=0)
    scale[scale == 0] = 1
    pulls = np.diag(np.sqrt(ridge)) if ridge else np.zeros((0, design.shape[1]))
    design = np.vstack((design / scale, pulls))
    wanted = np.concatenate((wanted, np.zeros(len(pulls))))
    terms = np.zeros(design.shape[1])
    kept = list(range(design.shape[1]))
    while kept:
        solution = np.linalg.lstsq(design[:, kept], wanted, rcond=None)[0]
        if solution.min() >= 0:
            terms[kept] = solution / scale[kept]
            break
        kept.pop(int(solution.argmin()))
    return tuple(terms.tolist())
