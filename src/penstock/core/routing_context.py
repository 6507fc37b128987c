"""Input of a routing policy: columns over all workers, to price a request on every worker at once."""

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOKEN_S_MIN = 1e-9
"""Lower bound of the time for one prompt token: 100 PFLOP/s on a model of 50 million parameters."""


@dataclass(frozen=True, slots=True)
class PriceColumns:
    """`core.types.instances.Prices` by worker slot. A worker without prices gets the median of the others'.

    Attributes:
        batch_tokens: most prompt tokens that one step computes.
        prompts_at_once: as in `EngineInfo`.
        onboard_token_s: (num_tiers, num_slots); all other columns are (num_slots,) float64.
        round_trip_s: from this router to the worker and back.
        byte_s: for each byte from this router to the worker.
        batch_requests: most requests that run at once.
    """

    prefill_step_s: NDArray[np.float64]
    prefill_token_s: NDArray[np.float64]
    prefill_pair_s: NDArray[np.float64]
    decode_step_s: NDArray[np.float64]
    decode_sequence_s: NDArray[np.float64]
    decode_token_s: NDArray[np.float64]
    batch_tokens: NDArray[np.float64]
    prompts_at_once: NDArray[np.float64]
    onboard_token_s: NDArray[np.float64]
    round_trip_s: NDArray[np.float64]
    byte_s: NDArray[np.float64]
    batch_requests: NDArray[np.float64]

    def worth_fetching(self) -> NDArray[np.bool_]:
        """(num_tiers, num_slots) bool: onboarding a token from the tier is no slower than computing it.

        Blocks of a tier that is slower count as not cached.
        """
        worth: NDArray[np.bool_] = self.onboard_token_s <= self.prefill_token_s
        return worth

    def with_move(
        self, onboard_token_s: NDArray[np.float64], round_trip_s: NDArray[np.float64]
    ) -> "PriceColumns":
        """Copy with other `onboard_token_s` and `round_trip_s`."""
        columns = list(_columns(self))
        columns[_ONBOARD], columns[_ROUND_TRIP] = onboard_token_s, round_trip_s
        return PriceColumns(*columns)


_COLUMNS = [field.name for field in fields(PriceColumns)]
_ONBOARD, _ROUND_TRIP = _COLUMNS.index("onboard_token_s"), _COLUMNS.index("round_trip_s")
_columns = attrgetter(*_COLUMNS)


@dataclass(slots=True)
class RoutingContext:
    """One request, and the state of all workers as columns of length `num_slots`, indexed by worker slot.

    Columns are live and read-only: copy what has to outlive the call. Load columns without a prefix are the worker's last
    report plus what this router has reserved since. `own_*` columns are unfinished requests of this router, `peer_*`
    columns those of all other routers as the worker reported them.

    Attributes:
        eligible: False for slots that are free, lost, draining or excluded, or busy while others are not.
        overlap_blocks: leading blocks of the prompt that the worker holds in any tier.
        tier_blocks: (num_tiers, num_slots), how many of these lie in each `Tier`; the nearest tier counts.
        active_blocks: blocks held by live requests.
        cached_blocks: blocks in the prefix cache, in use or not; the report only.
        context_tokens: tokens of context of all running requests.
        own_prefill_tokens: prompt tokens to compute, of requests without a first token.
        own_prefill_pairs: pairs of such a token with a token that it attends to.
        own_blocks: blocks of prompts.
        worker_ids: worker of the slot, 0 for a free one; a slot is reused.
        session: the client's name for its session.
        slo_ttft_s: what is left of the client's limit for the first token.
        slo_itl_s: the client's limit for each further token.
        prices: seconds of work on each worker.
        request_rate_per_s: recent rate of the model's requests, as this router saw or heard of them.
        mean_output_tokens: mean output length of these.
        turn: counts decisions, for policies that take turns.
        prompt_only: another worker decodes the request once this one has computed its prompt.
        output_tokens: expected length of this request's answer, as its client says; None: as the mean.
    """

    request_tokens: int
    request_blocks: int
    block_size: int
    eligible: NDArray[np.bool_]
    overlap_blocks: NDArray[np.int32]
    tier_blocks: NDArray[np.int32]
    active_blocks: NDArray[np.int64]
    cached_blocks: NDArray[np.int64]
    total_blocks: NDArray[np.int64]
    running_requests: NDArray[np.int64]
    waiting_requests: NDArray[np.int64]
    queued_prefill_tokens: NDArray[np.int64]
    context_tokens: NDArray[np.int64]
    peer_requests: NDArray[np.int64]
    peer_prefill_tokens: NDArray[np.int64]
    peer_prefill_pairs: NDArray[np.int64]
    own_requests: NDArray[np.int64]
    own_prefill_tokens: NDArray[np.int64]
    own_prefill_pairs: NDArray[np.int64]
    own_blocks: NDArray[np.int64]
    worker_ids: NDArray[np.int64]
    session: str | None
    slo_ttft_s: float | None
    slo_itl_s: float | None
    prices: PriceColumns
    request_rate_per_s: float
    mean_output_tokens: float
    turn: int
    now_s: float
    prompt_only: bool = False
    output_tokens: float | None = None

    @property
    def own_output_tokens(self) -> float:
        """Expected length of this request's answer."""
        return self.mean_output_tokens if self.output_tokens is None else self.output_tokens

    def step_s(self) -> NDArray[np.float64]:
        """(num_slots,) seconds of a step that decodes one token for each running request."""
        prices = self.prices
        step_s = prices.decode_step_s + self.running_requests * prices.decode_sequence_s
        step_s += self.context_tokens * prices.decode_token_s
        return step_s

    def batch_wait_s(self) -> NDArray[np.float64]:
        """(num_slots,) seconds until one more request fits into the worker's batch; 0 where the batch is not full.

        A full batch of n requests that each run for t seconds has one end every t / n seconds.
        """
        batch = self.prices.batch_requests
        ahead = np.maximum(self.running_requests + self.waiting_requests + 1.0 - batch, 0.0)
        wait_s: NDArray[np.float64] = ahead / batch * (max(self.mean_output_tokens, 1.0) * self.step_s())
        return wait_s

    def changed(self, **values: Any) -> "RoutingContext":
        """Copy with some fields changed; the other columns are shared. `dataclasses.replace` takes twenty times as long."""
        context = RoutingContext(*_fields(self))
        for name, value in values.items():
            setattr(context, name, value)
        return context


_fields = attrgetter(*(field.name for field in fields(RoutingContext)))
