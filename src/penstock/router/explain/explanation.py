"""Why a request went where it went, in words and numbers for people; docs/routing-reference.md says what each field is.

Kept decisions are arrays; only what is asked for becomes one of these.
"""

from enum import StrEnum

import msgspec

from penstock.core.types.events import Tier


class RouteReason(StrEnum):
    """What a decision came to, whatever the policy."""

    ONLY_WORKER = "only_worker"
    SESSION = "session"  # the worker of the request's session, whatever it costs there
    NO_PREFIX = "no_prefix"  # nobody holds any of it
    LONGEST_PREFIX = "longest_prefix"  # nobody holds more of it than the chosen one
    SHORTER_PREFIX = "shorter_prefix"  # somebody holds more of it, but cost more


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that might have got the request. `cost` is the sum of `terms` where the policy says any.

    None is a cost that rules it out. `overlap_blocks` of the prompt are there, in `tier_blocks` by tier.
    """

    worker: str
    cost: float | None
    terms: dict[str, float]
    overlap_blocks: int
    tier_blocks: dict[Tier, int]


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of the model that could not get the request: its condition, or `busy`, `excluded`, `without_adapter`, `other_role`, `unfit`.

    Busy is past a threshold; excluded is who refused this request, was lost with it, or was named by a gateway; unfit is a
    decode worker that cannot read the prefill worker's KV, or a prefill worker that the prompt does not fit or whose KV nobody can read.
    """

    worker: str
    why: str


class Prefill(msgspec.Struct, frozen=True, kw_only=True):
    """Where the prompt was to be computed: `remote` by the prefill worker `worker`, else by the worker that answers.

    `next_worker`, `reason`, `candidates` and `num_candidates` are of the prefill worker as an `Explanation`'s are of the one
    that answers. `local` is what the whole request was expected to cost there, `prefill` and `decode` its two parts elsewhere, moving
    the KV among the latter with the fixed `kv_transfer`, and `link_setup` what was charged beside for a link that was never used;
    None where the policy's costs are no times, or nothing was compared. `local_worker`, `prefill_worker` and `decode_worker` are
    the workers whose costs were compared. `setting` is the field of `router.disagg` that decided against these sums: `local_tokens_max`, or
    `late_token_share`, as the first token comes in half the time from the worker that answers.
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


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One decision. `worker` answers. `candidates`: the one chosen, then the cheapest, and whoever holds most of the prefix.

    `prefill` says where the prompt is computed, and by whom, where there are prefill workers. There were `num_candidates` and `num_left_out` in all. Costs and terms are in `unit`: `ms`, or `none` where they
    are no times. `age_s` is how long ago it was.
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
    prefill: Prefill | None = None

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]
