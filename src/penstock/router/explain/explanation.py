"""Explanations of decisions, for people; docs/routing-reference.md says what each field is."""

from enum import StrEnum

import msgspec

from penstock.core.types.events import Tier


class RouteReason(StrEnum):
    """Why a worker was chosen, for any policy."""

    ONLY_WORKER = "only_worker"
    SESSION = "session"  # the worker of the request's session
    NO_PREFIX = "no_prefix"  # no worker holds any of it
    LONGEST_PREFIX = "longest_prefix"  # no worker holds more of it than the chosen one
    SHORTER_PREFIX = "shorter_prefix"  # another worker holds more of it, and costs more


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An eligible worker. `cost` is the sum of `terms` where the policy has terms; None rules the worker out.

    `overlap_blocks` of the prompt are cached there, `tier_blocks` of them in each tier.
    """

    worker: str
    cost: float | None
    terms: dict[str, float]
    overlap_blocks: int
    tier_blocks: dict[Tier, int]


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of the model that was not eligible, and why: its condition, or one of these.

    busy:            past a busy threshold
    excluded:        it refused this request, was lost with it, or was excluded by a gateway
    without_adapter: it does not serve the LoRA adapter
    other_role:      a prefill worker, where none was needed
    unfit:           a decode worker that cannot read the prefill worker's KV, or a prefill worker whose KV no decode worker
                     can read or which the prompt does not fit
    """

    worker: str
    why: str


class PrefillExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Where the prompt is computed: `remote` by the prefill worker `worker`, else by the worker that answers.

    local, local_worker: cost of the whole request on one worker, and that worker
    prefill, prefill_worker: cost of the prompt on a prefill worker
    decode, decode_worker: cost of the rest on a decode worker, KV transfer included, with its fixed part `kv_transfer`
    link_setup: charge beside these for a link that was never used
    setting: the field of `router.disagg` that decided against these sums; None where the sums decided
    next_worker, reason, candidates, num_candidates: of the prefill worker, as an `RoutingExplanation` has them of the decode worker

    Costs are None where the policy's costs are no times, or where nothing was compared.
    """

    remote: bool
    local: float | None = None
    prefill: float | None = None
    decode: float | None = None
    link_setup: float | None = None
    kv_transfer: float | None = None
    local_worker: str | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    setting: str | None = None
    worker: str | None = None
    next_worker: str | None = None
    reason: RouteReason | None = None
    num_candidates: int = 0
    candidates: tuple[Candidate, ...] = ()


class RoutingExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One decision: `worker` answers.

    candidates: the chosen worker, the cheapest others, and the worker that holds most of the prefix; `num_candidates` in all
    left_out: workers that were not eligible; `num_left_out` in all
    prefill: where the prompt is computed, where there are prefill workers
    unit: of costs and terms: `ms`, or `none` where they are no times
    age_s: seconds since the decision
    """

    request_id: str
    model: str
    adapter: str | None
    policy: str
    reason: RouteReason
    unit: str
    worker: str
    next_worker: str | None
    request_tokens: int
    request_blocks: int
    block_size: int
    age_s: float
    num_candidates: int
    candidates: tuple[Candidate, ...]
    num_left_out: int
    left_out: tuple[LeftOut, ...]
    prefill: PrefillExplanation | None = None

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]
