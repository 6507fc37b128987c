"""Simulates requests on given workers, and tells whether they hold the SLO."""

import math
from collections.abc import Mapping, Sequence

from penstock.core.types.instances import Role
from penstock.core.wire import Wire
from penstock.planner.decide.capacity import Capacity
from penstock.planner.estimate.slo import Slo
from penstock.planner.rehearse.recent_demand import RehearsedRequest
from penstock.planner.rehearse.rehearsed_worker import Answer, RehearsedWorker
from penstock.planner.rehearse.step_prices import StepPrices

_STEPS_MAX = 200_000
"""Bounds the work of one rehearsal to some seconds of one core."""
_AFTER_S = 120.0
"""Requests that have not ended so long after the last arrival are late."""
_UNJUDGED = 0.2
"""Workers are empty in the beginning: the first fifth of the time is not judged."""


class Rehearsed(Wire, frozen=True):
    """How requests would fare on some workers.

    Attributes:
        workers: of each role.
        requests: judged ones, which came over `seconds`.
        ttft_s: at the SLO's percentile; None without requests.
        itl_s: likewise; None where no answer has two tokens.
        late: requests that missed a target.
        is_whole: all of it was simulated; else there was too much for the time that a rehearsal has.
    """

    workers: dict[Role, int]
    requests: int
    seconds: float
    ttft_s: float | None = None
    itl_s: float | None = None
    late: int = 0
    is_whole: bool = True

    def missed(self, slo: Slo) -> str:
        """Say which target would be missed, and by how much; empty if both hold."""
        if not self.is_whole:
            return ""
        for name, value, target_s in (("TTFT", self.ttft_s, slo.ttft_s), ("ITL", self.itl_s, slo.itl_s)):
            if value is not None and value > target_s:
                return f"{name} would be {value * 1e3:,.0f} ms at p{slo.percentile:g}, above {target_s * 1e3:,.0f} ms"
        return ""


def rehearse(
    requests: Sequence[RehearsedRequest],
    workers: Mapping[Role, int],
    capacities: Sequence[Capacity],
    slo: Slo,
) -> Rehearsed:
    """Simulate requests on so many workers; deterministic, and bounded in work.

    A prompt goes to the aggregated or prefill worker with the least prompt tokens to compute, and from a prefill worker to the
    decode worker with the fewest requests; KV transfers take no time.

    Args:
        requests: in the order of their times.
        workers: of each role.
        capacities: one of each role in `workers`, corrected by measured step times.
        slo: latency targets.
    """
    by_role = {
        capacity.role: _workers(capacity, count, _STEPS_MAX // max(1, sum(workers.values())))
        for capacity in capacities
        for count in (workers.get(capacity.role, 0),)
    }
    decoding = by_role.get(Role.DECODE, [])
    first = [*by_role.get(Role.AGGREGATED, []), *(by_role.get(Role.PREFILL, []) if decoding else [])]
    prefill = by_role.get(Role.PREFILL, [])
    seconds = requests[-1].at_s if requests else 0.0
    answers: list[Answer] = []
    moved: list[Answer] = []
    for request in requests:
        taken = _send(first or decoding, request.at_s)
        moves = request.output_tokens > 1 and any(taken is each for each in prefill)
        answer = Answer(
            request,
            left=request.new_tokens,
            tokens=1 if moves else request.output_tokens,
            context=request.input_tokens,
        )
        taken.put(answer, request.at_s)
        answers.append(answer)
        if moves:
            moved.append(answer)
    end_s = seconds + _AFTER_S
    is_whole = _finish(first or decoding, end_s)
    if is_whole and moved:
        is_whole = _decode(moved, decoding, end_s)
    begin_s = _UNJUDGED * seconds
    return _judged(
        [each for each in answers if each.request.at_s >= begin_s],
        dict(workers),
        slo,
        seconds,
        is_whole=is_whole,
    )


def _workers(capacity: Capacity, count: int, steps_max: int) -> list[RehearsedWorker]:
    prices = StepPrices(capacity.model)
    return [
        RehearsedWorker(
            prices,
            max_batch_tokens=capacity.max_batch_tokens,
            requests_max=capacity.requests_max,
            kv_tokens=capacity.model.kv_capacity_tokens,
            kv_held_tokens=capacity.model.kv_held_tokens,
            steps_max=steps_max,
        )
        for _ in range(count)
    ]


def _send(workers: Sequence[RehearsedWorker], at_s: float) -> RehearsedWorker:
    """Choose the worker with the least to do at `at_s`."""
    for worker in workers:
        worker.advance(at_s)
    return min(workers, key=lambda worker: worker.backlog)


def _finish(workers: Sequence[RehearsedWorker], end_s: float) -> bool:
    for worker in workers:
        worker.advance(end_s)
    return not any(worker.is_exhausted for worker in workers)


def _decode(moved: Sequence[Answer], workers: Sequence[RehearsedWorker], end_s: float) -> bool:
    """Let decode workers take the requests whose prompts are computed."""
    computed = sorted((each for each in moved if each.first_s <= end_s), key=lambda each: each.first_s)
    for answer in computed:
        answer.tokens, answer.last_s = answer.request.output_tokens - 1, math.nan
        _send(workers, answer.first_s).put(answer, answer.first_s)
    return _finish(workers, end_s)


def _judged(
    answers: Sequence[Answer], workers: dict[Role, int], slo: Slo, seconds: float, *, is_whole: bool
) -> Rehearsed:
    """Sum up; what has not come by the end counts as if it came then."""
    ttft_s, itl_s, late = [], [], 0
    end_s = seconds + _AFTER_S
    for answer in answers:
        first_s, last_s = (end_s if math.isnan(at_s) else at_s for at_s in (answer.first_s, answer.last_s))
        wait_s, gaps = first_s - answer.request.at_s, answer.request.output_tokens - 1
        gap_s = (last_s - first_s) / gaps if gaps > 0 else 0.0
        ttft_s.append(wait_s)
        if gaps > 0:
            itl_s.append(gap_s)
        late += wait_s > slo.ttft_s or gap_s > slo.itl_s or math.isnan(answer.last_s)
    return Rehearsed(
        workers=workers,
        requests=len(answers),
        seconds=seconds,
        ttft_s=_quantile(ttft_s, slo.percentile / 100),
        itl_s=_quantile(itl_s, slo.percentile / 100),
        late=late,
        is_whole=is_whole,
    )


def _quantile(values: list[float], share: float) -> float | None:
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]
