"""What a routing policy is given to price a request on every worker at once."""

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOKEN_S_MIN = 1e-9
"""No prompt token takes less: 100 PFLOP/s on a model of 50 million parameters."""


@dataclass(frozen=True, slots=True)
class PriceColumns:
    """`core.types.instances.Prices` by worker slot, each (num_slots,) float64, and `onboard_token_s` (num_tiers, num_slots).

    `batch_tokens`: the most prompt tokens that one step computes there; `batch_requests`: the most requests that run there at
    once, each in a place of the batch; `prompts_at_once`: as in `EngineInfo`. Workers
    that say no prices have the median of the others'. `round_trip_s` and `byte_s`: from this router to the worker and
    back, and for each byte on the way.
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
        """Say, (num_tiers, num_slots), from where KV comes at least as quickly as it is computed; else it counts as not cached."""
        worth: NDArray[np.bool_] = self.onboard_token_s <= self.prefill_token_s
        return worth

    def with_move(
        self, onboard_token_s: NDArray[np.float64], round_trip_s: NDArray[np.float64]
    ) -> "PriceColumns":
        """Make the same with other times out of tiers and to the workers."""
        columns = list(_columns(self))
        columns[_ONBOARD], columns[_ROUND_TRIP] = onboard_token_s, round_trip_s
        return PriceColumns(*columns)


_COLUMNS = [field.name for field in fields(PriceColumns)]
_ONBOARD, _ROUND_TRIP = _COLUMNS.index("onboard_token_s"), _COLUMNS.index("round_trip_s")
_columns = attrgetter(*_COLUMNS)


@dataclass(slots=True)
class RoutingContext:
    """What a policy may look at: columns indexed by worker slot, all of length `num_slots`.

    `overlap_blocks` is the prefix each worker holds, and `tier_blocks` (num_tiers, num_slots) how many of these
    blocks lie, at best, in each `Tier`. The load columns are the worker's own report plus what this router has
    reserved since; `cached_blocks` (with content that can be found, in use or not) only the report. The `own` columns are what
    this router sent there that has not ended: requests, prompt tokens to compute until the first token is here and the
    pairs of one of them with a token before it, and blocks of prompts. The `peer` columns are the same of all other
    routers, as the worker told. `eligible` masks slots that are free, lost,
    draining, excluded, or busy while others are not. `worker_ids` tells a slot's worker from the one that had it
    before, and is 0 where it is free; `session` is what the client calls its session, if it does. `slo_ttft_s` (what is
    left of it) and `slo_itl_s` are what the client wants the first token and each further one to take at most, if it
    says. `prices` is what work takes on each worker; `request_rate_per_s` and `mean_output_tokens` are what this router
    has lately seen or heard of the model's requests. With `prompt_only` it is answered elsewhere once its prompt is
    computed. All columns are live
    and cannot be written to: copy what is to be kept beyond the call.
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

    def step_s(self) -> NDArray[np.float64]:
        """Say, (num_slots,), what a step takes that decodes a token for each request that runs."""
        prices = self.prices
        step_s = prices.decode_step_s + self.running_requests * prices.decode_sequence_s
        step_s += self.context_tokens * prices.decode_token_s
        return step_s

    def place_wait_s(self) -> NDArray[np.float64]:
        """Say, (num_slots,), how long it takes until one more request has a place in a worker's batch.

        A place comes free where a request ends; of a full batch one does so in each answer's time over its places.
        """
        places = self.prices.batch_requests
        ahead = np.maximum(self.running_requests + self.waiting_requests + 1.0 - places, 0.0)
        wait_s: NDArray[np.float64] = ahead / places * (max(self.mean_output_tokens, 1.0) * self.step_s())
        return wait_s

    def changed(self, **values: Any) -> "RoutingContext":
        """Make one that differs in some fields, and shares the columns of all others; `replace` takes twenty times as long."""
        context = RoutingContext(*_fields(self))
        for name, value in values.items():
            setattr(context, name, value)
        return context


_fields = attrgetter(*(field.name for field in fields(RoutingContext)))
