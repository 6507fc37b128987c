"""The worker selector: applies a policy to a context and checks its costs. Decisions and replays both use it."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import PenstockError
from penstock.router.policies import Costs, SessionAffinity, cheapest, prices_of
from penstock.seams import ExplainedPolicy, HistoryPolicy, RoutingContext, RoutingPolicy

_WAITS = ("queue", "kv_wait")


class WorkerChoice(NamedTuple):
    """The cheapest slot, and the (num_terms, num_slots) `terms` of all slots."""

    slot: int
    terms: Costs
    eligible: NDArray[np.bool_]

    @property
    def cost(self) -> float:
        """The sum of the chosen slot's terms."""
        return float(self.terms[:, self.slot].sum())

    def prices(self) -> Costs:
        """Give the sums of the terms, infinite where a worker is not eligible."""
        return prices_of(self.terms, self.eligible)

    def costs_more(self, slot: int) -> float:
        """Give what the worker in a slot costs beyond the chosen one."""
        prices = self.prices()
        return float(prices[slot] - prices[self.slot])


class WorkerSelector:
    """Chooses by one policy, and tells a `HistoryPolicy` what was chosen. One event loop owns it."""

    def __init__(
        self, policy: RoutingPolicy, on_failure: Callable[[Exception], None] = lambda _: None
    ) -> None:
        """Use this policy; `on_failure` is called with what it raises, before the caller gets an error."""
        self.policy = policy
        self._on_failure = on_failure
        self._explained = policy if isinstance(policy, ExplainedPolicy) else None
        self.term_names = () if self._explained is None else tuple(self._explained.term_names)
        names = self.term_names
        self.wait_terms = [names.index(name) for name in _WAITS] if set(_WAITS) <= set(names) else []
        """Rows of the terms that predict a request's wait at a worker; both or none."""
        self.prefill_term = names.index("prefill") if "prefill" in names else None
        """Row of the term that predicts the prefill; None without one."""
        self.unit, self.scale = ("none", 1.0) if self._explained is None else ("ms", 1e3)
        """Unit and factor of costs in explanations. Costs of a policy without terms have no unit."""
        self._history = policy if isinstance(policy, HistoryPolicy) else None
        self._sessions = policy if isinstance(policy, SessionAffinity) else None

    def choose(self, context: RoutingContext, tie: int) -> WorkerChoice:
        """Choose the cheapest eligible slot; at least one is eligible, and `tie`, the request's hash, settles equal prices.

        Raises:
            PenstockError: the policy failed, gave another number of costs than workers, or no finite cost.
        """
        eligible = context.eligible
        try:
            terms = self._priced(context)
            if self._explained is None:
                terms = prices_of(terms, eligible)[None]
            slot = cheapest(terms, eligible, tie)  # where a cost is no number, that one
            self._check_finite(context, terms, slot)
        except Exception as error:
            raise self._failed(error) from error
        return WorkerChoice(slot, terms, eligible)

    def _priced(self, context: RoutingContext) -> Costs:
        """Give the policy's terms, or its costs as the only one.

        Raises:
            ValueError: their shape is wrong.
        """
        if self._explained is None:
            priced, expected = self.policy.costs(context), context.eligible.shape
        else:
            priced, expected = (
                self._explained.terms(context),
                (len(self.term_names), len(context.eligible)),
            )
        terms = np.asarray(priced, dtype=np.float64)
        if terms.shape != expected:
            raise ValueError(
                f"it gave an array of shape {terms.shape}, expected {expected}: a number for each worker"
            )
        return terms if self._explained is not None else terms[None]

    def _check_finite(self, context: RoutingContext, terms: Costs, slot: int) -> None:
        """Check the lowest cost.

        Raises:
            ValueError: it is not finite.
        """
        summands = terms[:, slot].tolist()
        if not math.isfinite(sum(summands)):
            named = zip(self.term_names or ("cost",), summands, strict=True)
            raise ValueError(
                f"it gave worker {context.worker_ids[slot]} {', '.join(f'{name} {value:g}' for name, value in named)};"
                " expected numbers, not all of them infinite (inf rules a worker out)"
            )

    def _failed(self, error: Exception) -> PenstockError:
        self._on_failure(error)
        return PenstockError(
            f"policy {self.policy.name!r} failed: {error!r}; penstock.testing.routing_policy.RoutingPolicySuite says"
            " what a policy must do"
        )

    def follows_session(self, context: RoutingContext, slot: int) -> bool:
        """Say whether a slot was chosen for the request's session; call it before `chosen`."""
        return self._sessions is not None and self._sessions.slot_of(context) == slot

    def chosen(self, context: RoutingContext, slot: int) -> None:
        """Tell a `HistoryPolicy` the slot that the request of this context goes to.

        Raises:
            PenstockError: the policy failed.
        """
        if self._history is None:
            return
        try:
            self._history.chosen(context, slot)
        except Exception as error:
            raise self._failed(error) from error
