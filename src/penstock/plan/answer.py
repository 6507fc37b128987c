"""Answers a question: ranks aggregated and disaggregated layouts, and computes the throughput curve over user speed."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

from penstock.core.errors import ConfigError, PenstockError
from penstock.perf.search import Layout
from penstock.plan.question import Question
from penstock.plan.trial import Effort, Processes, Proposal, predicted, requests_of_run, try_layout, weight

OnProgress = Callable[[int, int], None]
USUAL = Effort(requests=500, precision=0.03, step=1.06, layouts=3)
_RUNS = 4
"""Approximate number of rates at which a layout is simulated."""
_CURVE_MIN, _CURVE_MAX = 4, 11
"""Number of targets along the curve."""
_CURVE_PAIRS = 4000
"""Approximate number of parallelism pairs tried along the curve; with many pairs, fewer targets."""
_SLOWEST_TOKENS_PER_S = 5.0
_QUICKEST = 0.98
"""End of the curve, as a fraction of a lone user's speed."""


@dataclass(frozen=True, slots=True)
class Point:
    """Largest predicted rates at which each user gets `user_tokens_per_s`; 0 if impossible."""

    user_tokens_per_s: float
    aggregated_per_s: float
    """Requests per second on all devices, by aggregated workers."""
    disaggregated_per_s: float
    """Requests per second on all devices, by prefill and decode workers."""


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """`proposals` are ranked, best first; at least one."""

    question: Question
    proposals: tuple[Proposal, ...]
    curve: tuple[Point, ...] = ()

    @property
    def best(self) -> Proposal:
        return self.proposals[0]

    def best_of(self, *, disaggregated: bool) -> Proposal | None:
        """Give the best aggregated or disaggregated proposal; None without any."""
        return next((each for each in self.proposals if each.layout.is_disaggregated is disaggregated), None)


def find_answer(
    question: Question,
    processes: Processes,
    *,
    effort: Effort = USUAL,
    with_curve: bool = False,
    kept: Sequence[Proposal] = (),
    on_progress: OnProgress = lambda _done, _total: None,
) -> PlanAnswer:
    """Search layouts, and simulate the most promising ones.

    Args:
        question: model, devices, workload and targets.
        processes: run the simulations.
        effort: precision of the simulations.
        with_curve: also compute the curve over user speed.
        kept: simulated layouts that meet stricter targets; their rates are the search's start.
        on_progress: called with (done, total) parts of the work.

    Raises:
        ConfigError: no layout meets the targets.
        PenstockError: a simulating process was killed.
    """
    search = question.search()
    kinds = search.aggregated(), search.disaggregated()
    if not any(kinds) and not kept:
        raise ConfigError(question.why_not())
    known = {proposal.layout.role_layouts: proposal for proposal in kept}
    tried = [layout for kind in kinds for layout in promising(question, kind, effort)]
    targets = user_targets(question) if with_curve else []
    trials = [
        processes.submit(try_layout, question, each.layout, effort, each.seen) for each in known.values()
    ]
    trials += [
        processes.submit(try_layout, question, layout, effort)
        for layout in tried
        if layout.role_layouts not in known
    ]
    points = [processes.submit(point_at, question, target) for target in targets]
    work = [*trials, *points]
    try:
        for done, _ in enumerate(as_completed(work), start=1):
            on_progress(done, len(work))
        found = [proposal for trial in trials if (proposal := trial.result()) is not None]
        curve = raise_by_stricter([point.result() for point in points])
    except BrokenProcessPool as error:
        raise PenstockError(
            "a process that simulated was killed, perhaps as memory ran out; free some and try again"
        ) from error
    too_large = [kind[0] for kind in kinds if kind and kind[0] not in tried]
    found += map(predicted, too_large)
    if not found:
        raise ConfigError(question.why_not())
    return PlanAnswer(question, tuple(sorted(found, key=_rank)), curve)


def promising(question: Question, layouts: Sequence[Layout], effort: Effort) -> list[Layout]:
    """Choose layouts to simulate, fewer for long runs: the best predicted of each parallelism, then the second best.

    The best with and the best without data-parallel ranks come first: prediction overrates the former.
    """
    if not layouts:
        return []
    requests = requests_of_run(question.demand, layouts[0].rate_per_s, effort.requests)
    work = _RUNS * requests * weight(question.demand)
    count = min(int(effort.requests_max / work), effort.layouts)
    alike: Counter[tuple[object, ...]] = Counter()
    families: set[bool] = set()
    ordered = []
    for number, layout in enumerate(layouts):
        key = (*(role_layout.parallel for role_layout in layout.role_layouts), layout.local > 0)
        has_ranks = any(role_layout.parallel.dp > 1 for role_layout in layout.role_layouts)
        ordered.append((alike[key] if has_ranks in families else -1, number))
        families.add(has_ranks)
        alike[key] += 1
    return [layouts[number] for _, number in sorted(ordered)[:count]]


def user_targets(question: Question) -> list[float]:
    """Give speeds in tokens per second and user, from slow reading to the fastest worker."""
    context, models = round(question.demand.context_tokens), question.search().models
    most = max(_QUICKEST / model.decode_step_s(1, context) for model in models)
    least = min(_SLOWEST_TOKENS_PER_S, most / 2)
    count = min(max(_CURVE_PAIRS // len(models) ** 2, _CURVE_MIN), _CURVE_MAX)
    return [least + (most - least) * number / (count - 1) for number in range(count)]


def point_at(question: Question, user_tokens_per_s: float) -> Point:
    """Search with the ITL target of a user speed."""
    search = question.search(replace(question.demand, itl_s=1 / user_tokens_per_s))
    aggregated, disaggregated = (
        max((layout.rate_per_s for layout in kind), default=0.0)
        for kind in (search.aggregated(), search.disaggregated())
    )
    return Point(user_tokens_per_s, aggregated, disaggregated)


def raise_by_stricter(points: Sequence[Point]) -> tuple[Point, ...]:
    """Raise each point to the rate of any stricter target: a layout that meets the stricter one meets this one too.

    Args:
        points: from the loosest target to the strictest.
    """
    kept: list[Point] = []
    for point in reversed(points):
        stricter = kept[-1] if kept else point
        kept.append(
            replace(
                point,
                aggregated_per_s=max(point.aggregated_per_s, stricter.aggregated_per_s),
                disaggregated_per_s=max(point.disaggregated_per_s, stricter.disaggregated_per_s),
            )
        )
    return tuple(reversed(kept))


def _rank(proposal: Proposal) -> tuple[float, int]:
    return -proposal.seen.rate_per_s, proposal.layout.devices
