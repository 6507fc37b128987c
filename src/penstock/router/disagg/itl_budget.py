"""ITL interference budget: how many decode steps a prompt computed on a decode worker may still delay.

A prompt that waits long for prefill workers may be computed on a decode worker instead, whose streams are late by that. While
late steps are fewer than `router.disagg.late_token_share` of all steps, ITL percentiles below that share do not show them,
whereas TTFT percentiles are made of the longest waits.

A worker's budget is kept in seconds. It fills as time passes. A late step costs the time of as many steps as one of them may
be late, plus the time of the late step itself, in which no other step is made.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.core.log import get_logger
from penstock.core.routing_context import TOKEN_S_MIN
from penstock.router.config import RouterConfig
from penstock.router.disagg.adjustment import Adjustment
from penstock.router.disagg.disagg import DisaggDecision
from penstock.router.metrics import RouterMetrics
from penstock.router.policy.policies import cheapest, uncached_tokens
from penstock.router.policy.selector import Choice, WorkerSelector
from penstock.router.workers.loads import LoadTracker
from penstock.seams import RoutingContext

WINDOW_S = 10.0
"""What a budget holds: late steps are of use in bursts, and over a minute the share is to be kept as well."""
_UNTIL_FIRST_TOKEN = ("queue", "kv_wait", "onboard", "prefill", "network")

_log = get_logger()


class ItlBudget(Adjustment):
    """One router's budgets, by worker slot."""

    def __init__(
        self, config: RouterConfig, selector: WorkerSelector, loads: LoadTracker, metrics: RouterMetrics
    ) -> None:
        """Have full budgets; none where `late_token_share` is 0."""
        self._share = config.disagg.late_token_share
        self._selector = selector
        self._loads = loads
        self._metrics = metrics
        self._empty_s = np.full(
            loads.num_slots, -np.inf
        )  # when a budget had nothing left, or will have nothing
        if self._share and not _predicts_first_tokens(selector):
            _log.warning(
                "late_token_share_without_effect",
                policy=config.policy,
                fix="router.disagg.late_token_share is set, but this policy does not predict when first tokens come, so that"
                " prompts wait for prefill workers: choose kv, or a policy with terms `queue`, `kv_wait` and `prefill`, or leave it out",
            )

    def override(self, context: RoutingContext) -> "Budget | None":
        if not self._share:
            return None
        routers = 1 + self._loads.peers
        return Budget(
            left_s=np.minimum(context.now_s - self._empty_s, WINDOW_S) / routers,
            most_s=WINDOW_S / routers,
            step_s=np.maximum(context.step_s(), TOKEN_S_MIN) / self._share,
        )

    def taken(self, decision: DisaggDecision, tie: int, *, again: bool) -> None:
        """Spend what a prompt on a decode worker costs; a prompt whose route was stale costs both times."""
        del tie
        budget, compared = decision.inputs.override, decision.comparison
        if isinstance(budget, Budget) and compared.remote is not None and not compared.is_remote:
            slot = decision.whole.slot
            steps, cost_s = budget.late(decision.whole_context, decision.whole, self._selector)
            if steps[slot]:
                self.spend(slot, float(cost_s[slot]), decision.whole_context.now_s)
                self._metrics.late_steps.inc(0 if again else int(steps[slot]))

    def spend(self, slot: int, seconds: float, now_s: float) -> None:
        """Take seconds off a worker's budget, which then lacks at most these or a window."""
        spent_s = seconds * (1 + int(self._loads.peers[slot]))
        empty_s = max(self._empty_s[slot], now_s - WINDOW_S) + spent_s
        self._empty_s[slot] = min(empty_s, now_s + max(spent_s, WINDOW_S))

    def grow(self, num_slots: int) -> None:
        more = num_slots - len(self._empty_s)
        self._empty_s = np.pad(self._empty_s, (0, more), constant_values=-np.inf)

    def forget(self, slot: int) -> None:
        self._empty_s[slot] = -np.inf

    def check(self, num_slots: int) -> None:
        assert len(self._empty_s) == num_slots, "ITL budgets: as many as loads"


@dataclass(frozen=True, slots=True)
class Budget:
    """One router's part of each worker's budget; an `Override` that spends it.

    left_s: (num_slots,) seconds, below 0 where too much was spent
    most_s: (num_slots,) seconds of a full budget
    step_s: (num_slots,) seconds that a late step costs beside its own time
    """

    left_s: NDArray[np.float64]
    most_s: NDArray[np.float64]
    step_s: NDArray[np.float64]

    def adjust(self, decision: DisaggDecision, selector: WorkerSelector, tie: int) -> DisaggDecision:
        """Compute a prompt on a decode worker that gives the first token in less than half the time, and can afford it.

        A full budget is enough for any prompt: what it lacks afterwards is made up for before the next prompt.
        """
        whole, prompt = decision.whole, decision.prompt
        if not decision.comparison.is_remote or not _predicts_first_tokens(selector):
            return decision
        names = selector.term_names
        until_first = [names.index(name) for name in _UNTIL_FIRST_TOKEN if name in names]
        here_s = whole.terms[until_first].sum(axis=0)
        there_s = float(prompt.terms[until_first, prompt.slot].sum())
        may = whole.eligible & (2 * here_s < there_s)
        _, cost_s = self.late(decision.whole_context, whole, selector)
        may &= (cost_s <= self.left_s) | (self.left_s >= self.most_s)
        if not np.count_nonzero(may):
            return decision
        here = Choice(cheapest(whole.terms, may, tie), whole.terms, whole.eligible)
        compared = replace(
            decision.comparison,
            local=here.cost,
            local_slot=here.slot,
            is_remote=False,
            setting="late_token_share",
        )
        return replace(decision, whole=here, comparison=compared)

    def late(
        self, context: RoutingContext, whole: Choice, selector: WorkerSelector
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Give the steps that the prompt makes late on each decode worker, and their cost in seconds; both (num_slots,)."""
        if not _predicts_first_tokens(selector):
            return np.zeros_like(self.left_s), np.zeros_like(self.left_s)
        is_slow = ~context.prices.worth_fetching()
        recomputed = (context.tier_blocks * is_slow).sum(axis=0) * context.block_size
        tokens = np.minimum(uncached_tokens(context) + recomputed, context.request_tokens)
        steps = np.ceil(tokens / np.maximum(context.prices.batch_tokens, 1.0)) * (
            context.running_requests > 0
        )
        taken_s = whole.terms[selector.prefill_term] * (steps > 0)
        return steps, steps * self.step_s + taken_s


def _predicts_first_tokens(selector: WorkerSelector) -> bool:
    return bool(selector.wait_terms) and selector.prefill_term is not None
