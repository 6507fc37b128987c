"""How a run went over time, in few enough numbers to be drawn and kept."""

import numpy as np

from benchmarks.planner.workload import Workload
from penstock.core.types.instances import Role

_MINUTE_S = 60.0
_MINUTES_MAX = 150
_LONG_BIN_MINUTES = 5


def timeline(
    load: Workload, is_good: np.ndarray, history: list[tuple[float, int, dict[Role, int]]]
) -> dict[str, list[float]]:
    """Give values of each minute, or of each five minutes of a run of more than 150.

    `requests_per_s` and `input_tokens_per_s` arrive; `attainment` is the share within both targets of the requests that arrive in
    a minute, of several the worst one's; the workers of each role are the most in that time, those that drain left out.

    Args:
        load: the requests.
        is_good: (requests,) bool, within both targets.
        history: time, all workers, and workers of each role, whenever they changed.
    """
    minutes = max(1, int(load.span_s / _MINUTE_S))
    each = 1 if minutes <= _MINUTES_MAX else _LONG_BIN_MINUTES
    bins = minutes // each
    minutes = bins * each
    edges = np.searchsorted(load.at_s, np.arange(minutes + 1) * _MINUTE_S)
    counts = np.diff(edges)
    good = np.diff(np.concatenate([[0], np.cumsum(is_good)])[edges])
    share = np.where(counts > 0, good / np.maximum(counts, 1), 1.0)
    tokens = np.diff(np.concatenate([[0], np.cumsum(load.input_tokens)])[edges])
    found = {
        "requests_per_s": _mean(counts / _MINUTE_S, each),
        "input_tokens_per_s": _mean(tokens / _MINUTE_S, each),
        "attainment": [round(float(value), 4) for value in share.reshape(bins, each).min(axis=1)],
    }
    for role in sorted({role for _, _, counts in history for role in counts}):
        found[f"workers_{role}"] = _most(
            [(at_s, counts.get(role, 0)) for at_s, _, counts in history], bins, each * _MINUTE_S
        )
    return found


def _mean(values: np.ndarray, each: int) -> list[float]:
    return [round(float(value), 2) for value in values.reshape(-1, each).mean(axis=1)]


def _most(history: list[tuple[float, int]], bins: int, bin_s: float) -> list[float]:
    """Give the largest count in each bin."""
    found = []
    at, count = 0, history[0][1]
    for end_s in np.arange(1, bins + 1) * bin_s:
        most = count
        while at < len(history) and history[at][0] <= end_s:
            count = history[at][1]
            most = max(most, count)
            at += 1
        found.append(float(most))
    return found
