"""A request's scored candidates: its cost on every worker, and the plan that takes the cheapest."""

from collections.abc import Collection, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import WorkerId
from penstock.core.routing_context import TOKEN_S_MIN
from penstock.core.types.requests import Request
from penstock.router.disagg import DisaggDecision
from penstock.router.selector import WorkerChoice
from penstock.seams import RoutingContext


class WorkerRoute(msgspec.Struct, frozen=True):
    """One worker's part of a plan: `overlap_blocks` of the prompt's `blocks` are cached there, or come there from a prefill worker."""

    worker_id: WorkerId
    slot: int
    prefill_tokens: int
    cached_tokens: int
    overlap_blocks: int
    blocks: int


class RoutePlan(msgspec.Struct, frozen=True):
    """The decode worker of a request, and its prefill worker; None where the decode worker prefills too."""

    decode: WorkerRoute
    prefill: WorkerRoute | None = None


class ScoredCandidates(msgspec.Struct, frozen=True):
    """A request's cost on every worker. Valid in this turn of the loop only, as loads are live.

    context, choice: of the worker that computes the prompt: the prefill worker where `is_disaggregated`
    tie:             settles equal prices
    excluded:        workers that must not get the request
    wait_terms:      rows of the terms that predict its wait; empty for policies that predict none
    decision:        both ways to answer the request; None where no prefill worker may get the prompt
    """

    request: Request
    context: RoutingContext
    choice: WorkerChoice
    tie: int
    excluded: Collection[WorkerId]
    wait_terms: Sequence[int]
    decision: DisaggDecision | None = None

    @property
    def is_disaggregated(self) -> bool:
        return self.decision is not None and self.decision.comparison.is_remote

    @property
    def whole_context(self) -> RoutingContext:
        """The context of the whole request, on the workers that may answer it."""
        return self.context if self.decision is None else self.decision.whole_context

    def choices(self) -> list[tuple[RoutingContext, WorkerChoice]]:
        """Give the workers to take: the prefill worker, if any, then the worker that answers; each with its context."""
        first, decision = (self.context, self.choice), self.decision
        if not self.is_disaggregated or decision is None or decision.rest is None:
            return [first]
        assert decision.rest_context is not None, "priced on it"
        return [first, (decision.rest_context, decision.rest)]

    def waits_s(self) -> NDArray[np.float64]:
        """Give (num_slots,) predicted seconds until its work begins."""
        queue, memory = self.wait_terms
        terms = self.choice.terms
        waits_s: NDArray[np.float64] = terms[queue] + terms[memory]
        return waits_s

    def begins_within(self, seconds: float) -> bool:
        """Say whether the cheapest worker has a free batch slot and begins its work within `seconds`."""
        queue, memory = self.wait_terms
        context, slot, terms = self.context, self.choice.slot, self.choice.terms
        present = context.running_requests[slot] + context.waiting_requests[slot]
        has_slot = bool(present < context.prices.batch_requests[slot])
        return has_slot and bool(terms[queue, slot] + terms[memory, slot] <= seconds)

    def work_s(self) -> NDArray[np.float64]:
        """Give (num_slots,) seconds of its cost without its own wait; infinite for workers that are not eligible."""
        work_s: NDArray[np.float64] = self.choice.prices()
        np.subtract(work_s, self.waits_s(), out=work_s, where=np.isfinite(work_s))
        return work_s

    def share_s(self) -> float:
        """Give the seconds that all eligible workers together need for it: its uncached prompt, or its batch slot where that is more."""
        context = self.context
        prices, eligible = context.prices, context.eligible
        speeds = prices.prompts_at_once / np.maximum(prices.prefill_token_s, TOKEN_S_MIN)
        output = min(context.own_output_tokens, self.request.sampling.max_tokens - self.request.num_emitted)
        answer_s = max(output, 1.0) * np.maximum(context.step_s(), TOKEN_S_MIN)
        places = prices.batch_requests / answer_s
        return max(float(context.request_tokens / speeds[eligible].sum()), float(1 / places[eligible].sum()))
