"""What a request costs on every worker, and the way it takes if that is accepted."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import WorkerId
from penstock.core.routing_context import TOKEN_S_MIN
from penstock.core.types import Request
from penstock.router.chooser import Choice
from penstock.router.cold_links import Foregone
from penstock.router.disagg import Comparison, Weighed
from penstock.seams import RoutingContext


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, and what it will need there: `overlap_blocks` of its prompt's `blocks` are cached.

    With `hand_over` only its prompt is computed there, and another worker goes on.
    """

    worker_id: WorkerId
    slot: int
    prefill_tokens: int
    cached_tokens: int
    overlap_blocks: int
    blocks: int
    hand_over: bool = False


@dataclass(frozen=True, slots=True)
class Quote:
    """What a request costs on every worker, good for this turn of the loop: loads are live.

    With `hand_over` it is of a prompt on prefill workers; with `handed_blocks` of what follows, that many (perhaps 0) being
    there to be had from one, in slot `source`, or soon to be had (`is_early`), by `takers` (num_slots,) alone, or by anybody; `weighed` are the two ways where both are open.
    `foregone` is the link that it would go over if nothing were charged for it. `tie` settles equal prices, `excluded` may not get it. `wait_terms` are the rows of the terms that say how long it would wait, none where the
    policy does not predict that.
    """

    request: Request
    context: RoutingContext
    choice: Choice
    tie: int
    excluded: Collection[WorkerId]
    wait_terms: Sequence[int]
    hand_over: bool = False
    handed_blocks: int | None = None
    source: int | None = None
    takers: NDArray[np.bool_] | None = None
    is_early: bool = False
    foregone: Foregone | None = None
    weighed: Weighed | None = None

    @property
    def comparison(self) -> Comparison | None:
        return None if self.weighed is None else self.weighed.comparison

    def waits_s(self) -> NDArray[np.float64]:
        """Give (num_slots,) seconds before its work would begin."""
        queue, memory = self.wait_terms
        terms = self.choice.terms
        waits_s: NDArray[np.float64] = terms[queue] + terms[memory]
        return waits_s

    def begins_within(self, seconds: float) -> bool:
        """Say whether its work would begin so soon where it is cheapest, in a place of the batch that is free."""
        queue, memory = self.wait_terms
        context, slot, terms = self.context, self.choice.slot, self.choice.terms
        present = context.running_requests[slot] + context.waiting_requests[slot]
        has_place = bool(present < context.prices.batch_requests[slot])
        return has_place and bool(terms[queue, slot] + terms[memory, slot] <= seconds)

    def work_s(self) -> NDArray[np.float64]:
        """Give (num_slots,) seconds that it costs beside its own waiting; infinite where it may not go."""
        work_s: NDArray[np.float64] = self.choice.prices()
        np.subtract(work_s, self.waits_s(), out=work_s, where=np.isfinite(work_s))
        return work_s

    def share_s(self) -> float:
        """Give what it takes if all workers that may get it shared the work: its prompt, none of it cached, or its place, where that is more."""
        context = self.context
        prices, eligible = context.prices, context.eligible
        speeds = prices.prompts_at_once / np.maximum(prices.prefill_token_s, TOKEN_S_MIN)
        output = min(context.mean_output_tokens, self.request.sampling.max_tokens - self.request.num_emitted)
        answer_s = max(output, 1.0) * np.maximum(context.step_s(), TOKEN_S_MIN)
        places = prices.batch_requests / answer_s
        return max(float(context.request_tokens / speeds[eligible].sum()), float(1 / places[eligible].sum()))
