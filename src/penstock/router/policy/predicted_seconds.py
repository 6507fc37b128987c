"""The `kv` policy: a request goes where it costs everybody the fewest seconds.

docs/routing.md says in words what each term is; docs/decisions/0012 derives them and has the measurements.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.core.native import native
from penstock.core.routing_context import TOKEN_S_MIN
from penstock.seams import RoutingContext

Column = NDArray[np.float64]

PACE_WEIGHT = 5.0
"""A second more between two tokens of an answer is as bad as this many more until its first one: 20 ms more between
tokens, which readers notice, weigh as much as 100 ms of waiting. A request with targets for both has their ratio."""
_PACE_WEIGHTS = (1.0, 100.0)
"""Bounds of that ratio: targets are promises to users, and say less of what a millisecond is worth the further apart they are."""
_BUSY_PERIOD = 2.0
"""How long a worker stays busy, over the work that is before it now: those who come meanwhile bring work of their own.
1 / (1 - load) of a queue; at half load, where decisions begin to matter."""
_TOKEN_BYTES, _HASH_BYTES = 4, 16
"""What of a request grows with its prompt: a token's id and a block's hash."""
_FOLLOWERS_MAX = 100.0
"""Past so many requests that would wait behind this one, others are long being sent elsewhere; binds in overload alone."""


@dataclass(frozen=True, slots=True)
class PredictedSeconds:
    """Seconds until this request's first token, and what it adds to the waiting of others.

    Everything is priced by what the workers say of themselves (`Prices`), so that they need not be alike. No term
    falls where a queue is longer, and none rises where more of the prompt is cached.
    """

    name: ClassVar[str] = "kv"
    term_names: ClassVar[tuple[str, ...]] = (
        "queue",
        "memory",
        "onboard",
        "prefill",
        "pace",
        "slowdown",
        "followers",
        "room",
        "network",
        "miss",
    )

    def costs(self, context: RoutingContext) -> Column:
        """Return (num_slots,) seconds."""
        costs: Column = self.terms(context).sum(axis=0)
        return costs

    def terms(self, context: RoutingContext) -> Column:
        """Return (num_terms, num_slots) seconds, named by `term_names`."""
        if native is None:
            return terms_python(context)
        terms: Column = native.predicted_seconds(
            context,
            _pace_weight(context),
            *_targets(context),
            _BUSY_PERIOD,
            _FOLLOWERS_MAX,
            TOKEN_S_MIN,
            _request_bytes(context),
        )
        return _with_places(terms, context)


def terms_python(context: RoutingContext) -> Column:
    """Do what `PredictedSeconds.terms` does with the native function, to the last bit."""
    return _with_places(_priced(context), context)


_MEMORY = PredictedSeconds.term_names.index("memory")


def _with_places(terms: Column, context: RoutingContext) -> Column:
    """Have requests wait for a place in the batch as well, where that takes longer: whoever ends gives both back."""
    present = context.running_requests + context.waiting_requests
    if np.count_nonzero(present >= context.prices.batch_requests):  # a third of what `any` takes
        np.maximum(terms[_MEMORY], context.place_wait_s(), out=terms[_MEMORY])
    return terms


def _priced(context: RoutingContext) -> Column:
    """Price all but places in batches, as the native `predicted_seconds` does, to the last bit; 17 workers take 47 us, and 5 us there."""
    prices, size, output = context.prices, context.block_size, max(context.mean_output_tokens, 1.0)
    running, total = context.running_requests, context.total_blocks
    step_s = context.step_s()
    # A step that computes prompts decodes as well: its time is shared by all tokens of a prompt that fit into it. Of a
    # worker whose data-parallel ranks compute a prompt each, that is one rank's part.
    ranks = prices.prompts_at_once
    token_s = prices.prefill_token_s + step_s * (ranks / prices.batch_tokens)

    queued, pairs = _queued(context)
    queue = (queued * token_s + pairs * prices.prefill_pair_s) / ranks

    is_quick = prices.worth_fetching()
    onboard = size * (context.tier_blocks * (prices.onboard_token_s * is_quick)).sum(axis=0)
    had = context.overlap_blocks - (context.tier_blocks * ~is_quick).sum(axis=0)
    cached = np.minimum(had * size, context.request_tokens - 1)
    uncached = context.request_tokens - cached
    attended = uncached * (cached + (uncached + 1) / 2)
    prefill = prices.prefill_step_s + uncached * token_s + attended * prices.prefill_pair_s

    # What is asked of memory and is not there has to be given back first; all of it is, in one answer's time.
    growing = (running + context.waiting_requests) * (output / 2 / size)
    asked = context.active_blocks + queued / size + growing
    new_blocks = context.request_blocks - context.tier_blocks[0]
    asked += new_blocks
    of_all = np.where(total > 0, 1.0, 0.0) / np.maximum(total, 1)
    answer_s = output * step_s
    memory = np.maximum(asked - total, 0.0) * of_all * answer_s

    # Each of those decoding loses this prefill once, and in every step the time that one more takes.
    more_s = prices.decode_sequence_s + (context.request_tokens + output / 2) * prices.decode_token_s
    weight = _pace_weight(context)
    slowdown = weight * running * (prefill / output + more_s)

    # Requests come to a worker as it is fast: those twice as fast get twice as many. This one keeps one rank busy.
    # They are routed too, so that they wait for as long as at the middle worker: the more of a queue is here, the
    # sooner they go elsewhere.
    speed = context.eligible * ranks / np.maximum(prices.prefill_token_s, TOKEN_S_MIN)
    rate_per_s = context.request_rate_per_s * speed / max(float(speed.cumsum()[-1]), 1.0)
    shared = prefill / ranks
    followers = rate_per_s * _BUSY_PERIOD * (_middle(queue + memory, context) + shared)
    delayed = shared * np.minimum(followers, _FOLLOWERS_MAX)

    # Its blocks are held for an answer's time; whoever wants memory meanwhile waits for that part of it. That somebody
    # does has a probability of about use^(sqrt(2 (n + 1)) - 1) where n requests fit: use^8 for forty (Sakasegawa 1977).
    # Nobody needs to wait for it longer than at the middle worker either, but sooner where there is more of it.
    use = np.minimum(asked * of_all, 1.0)
    crowded = np.minimum(use, _middle(use, context))
    crowded *= crowded
    crowded *= crowded
    crowded *= crowded
    wanting_s = np.minimum(memory, _middle(memory, context))
    wanting = np.minimum(rate_per_s * _BUSY_PERIOD * wanting_s, _FOLLOWERS_MAX)
    room = new_blocks * of_all * answer_s * (_BUSY_PERIOD * crowded + wanting)

    network = prices.round_trip_s + _request_bytes(context) * prices.byte_s

    ttft_s, itl_s = _targets(context)
    miss = _missed(queue + memory + onboard + prefill + network, ttft_s) + weight * _missed(
        step_s + more_s, itl_s
    )
    pace = weight * step_s
    return np.stack((queue, memory, onboard, prefill, pace, slowdown, delayed, room, network, miss))


def _middle(column: Column, context: RoutingContext) -> float:
    """Give the lower median over the eligible workers: one that is stuck, or idle, says nothing of the others."""
    eligible = column[context.eligible]
    if not len(eligible):
        return 0.0
    at = (len(eligible) - 1) // 2
    return float(np.partition(eligible, at)[at])


def _request_bytes(context: RoutingContext) -> float:
    """Say about how long the request is on its way to a worker."""
    return float(_TOKEN_BYTES * context.request_tokens + _HASH_BYTES * context.request_blocks)


def _targets(context: RoutingContext) -> tuple[float, float]:
    """Give what the first token and each further one should take at most; infinite where the client does not say."""
    ttft_s, itl_s = context.slo_ttft_s, context.slo_itl_s
    return math.inf if ttft_s is None else ttft_s, math.inf if itl_s is None else itl_s


def _pace_weight(context: RoutingContext) -> float:
    """Say how many seconds until the first token one between two tokens is worth to this request."""
    ttft_s, itl_s = context.slo_ttft_s, context.slo_itl_s
    if context.prompt_only:
        return 0.0  # its answer is paced elsewhere, and prefill workers have none to slow down
    if ttft_s is None or itl_s is None:
        return PACE_WEIGHT
    low, high = _PACE_WEIGHTS
    return min(max(ttft_s / itl_s, low), high)


def _missed(predicted_s: Column, target_s: float) -> Column:
    """Price a miss: what is past the target counts again, and at twice the target all is lost that there is to lose."""
    late: Column = np.clip(predicted_s - target_s, 0.0, target_s)
    return late


def _queued(context: RoutingContext) -> tuple[Column, Column]:
    """Say how many prompt tokens are before this one on each worker, and how many pairs they attend to.

    A report counts waiting prompts whole, while the router that sent one knows what of it was cached: the routers'
    account holds for what they sent, as far as a report does not say that less is left, and the report for the rest.
    """
    queued = context.queued_prefill_tokens
    known = context.own_prefill_tokens + context.peer_prefill_tokens
    left = np.minimum(known, queued)
    requests = np.maximum(context.running_requests + context.waiting_requests, 1)
    others = 1.0 - np.minimum((context.own_requests + context.peer_requests) / requests, 1.0)
    pairs = context.own_prefill_pairs + context.peer_prefill_pairs
    return left + (queued - left) * others, pairs * (left / np.maximum(known, 1))
