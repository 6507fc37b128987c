"""Makes each strategy, and guesses the workers that a workload needs, by the latency model of each role."""

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.planner.baselines import (
    Autoscaler,
    Interpolation,
    Oracle,
    Static,
    Strategy,
    expect,
    needed,
)
from benchmarks.planner.planned import ROLES, Planned
from benchmarks.planner.workload import Workload
from benchmarks.planner.world.fleets import Model
from penstock.core.types.instances import Role

WORKERS_MAX = 40
_PEAK_BIN_S = 30.0
_MINUTE_S = 60.0
_REQUESTS_MIN = 2000
_PREFILL_SHARE, _DECODE_SHARE = 0.3, 0.6
"""Mean TTFT and ITL of a worker at its largest rate, over their targets: a guess."""


def make_strategy(
    name: str, setting: Sequence[float], load: Workload, model: Model, roles: Sequence[Role]
) -> Strategy:
    """Make one strategy.

    Args:
        name: one of `ROLES`, or of the others.
        setting: replicas of each role, if static; else the number that the strategy is tuned by, or none.
        load: what it is to serve; only the oracle looks at more than its mean.
        model: its workers.
        roles: roles that baselines scale.
    """
    if name == "static":
        return Static()
    if name in ROLES:
        return Planned(model, ROLES[name], setting[0] if setting else None)
    capacities = tuple(model.capacity(role) for role in roles)
    (factor,) = setting
    if name == "autoscaler":
        return Autoscaler({role: factor * open_at_capacity(load, model, role) for role in roles})
    if name == "interpolation":
        return Interpolation(capacities, model.slo, factor)
    return Oracle({each.role: needed(load, each, model.slo, WORKERS_MAX, factor) for each in capacities})


def workers_at_peak(load: Workload, model: Model, roles: Sequence[Role]) -> dict[Role, int]:
    """Guess the workers that the busiest 30 s need, each role by its own."""
    edges = np.arange(0, load.span_s + _PEAK_BIN_S, _PEAK_BIN_S)
    ends = np.searchsorted(load.at_s, edges)
    tokens = {
        Role.AGGREGATED: np.ones(load.requests),
        Role.PREFILL: load.input_tokens,
        Role.DECODE: load.output_tokens,
    }
    found = {}
    for role in roles:
        sums = np.diff(np.concatenate([[0], np.cumsum(tokens[role])])[ends])
        busiest = int(sums.argmax())
        wide = slice(ends[max(0, busiest - 4)], ends[min(len(ends) - 1, busiest + 5)])
        rate_per_s = float(ends[busiest + 1] - ends[busiest]) / _PEAK_BIN_S
        found[role] = _workers(load, model, role, rate_per_s, wide)
    return found


def workers_at_mean(load: Workload, model: Model, roles: Sequence[Role]) -> dict[Role, int]:
    """Guess the workers that the mean rate needs."""
    rate_per_s = load.requests / load.span_s
    return {role: _workers(load, model, role, rate_per_s, slice(None)) for role in roles}


def workers_at_first(load: Workload, model: Model, roles: Sequence[Role], start_s: float) -> dict[Role, int]:
    """Give every strategy the workers with which it begins: what the busiest minute needs until a worker that it starts is ready, and a quarter more.

    With fewer, the beginning would decide what a strategy can hold, whatever it does.
    """
    until_s = min(load.span_s, start_s + _MINUTE_S)
    ends = np.searchsorted(load.at_s, np.arange(0, until_s + 1, _MINUTE_S))
    rate_per_s = float(np.diff(ends).max()) / _MINUTE_S
    first = slice(0, max(int(ends[-1]), _REQUESTS_MIN))
    return {role: math.ceil(1.25 * _workers(load, model, role, rate_per_s, first)) for role in roles}


def open_at_capacity(load: Workload, model: Model, role: Role) -> float:
    """Guess the open requests of a worker at its largest rate within the SLO."""
    expected = expect(load.input_tokens, load.output_tokens, 1.0)
    rate_per_s = model.capacity(role).rate_per_s(1, expected, model.slo)
    if role is Role.PREFILL:
        return max(1.0, rate_per_s * _PREFILL_SHARE * model.slo.ttft_s)
    return max(1.0, rate_per_s * expected.output_tokens * _DECODE_SHARE * model.slo.itl_s)


def _workers(load: Workload, model: Model, role: Role, rate_per_s: float, of: slice) -> int:
    """Give the workers for a rate of requests as those in `of`."""
    expected = expect(load.input_tokens[of], load.output_tokens[of], rate_per_s)
    return model.capacity(role).workers(rate_per_s, expected, model.slo, WORKERS_MAX) or WORKERS_MAX
