"""The `kv` policy: a request goes where it costs everybody the fewest seconds.

docs/routing-reference.md says what each term is, docs/decisions/0012 why; benchmarks/notes/routing.md derives them.
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

ITL_WEIGHT = 5.0
"""Seconds of TTFT that one second of ITL is worth: 20 ms more between two tokens weigh as much as 100 ms of waiting. A request
with targets for both has the ratio of its targets."""
_ITL_WEIGHTS = (1.0, 100.0)
"""Bounds of that ratio. Targets far apart say little of what a millisecond is worth."""
_BUSY_PERIOD = 2.0
"""How long a worker stays busy, over its present work: requests that arrive meanwhile bring more. 1 / (1 - load) of a queue at
half load, where decisions begin to matter."""
_TOKEN_BYTES, _HASH_BYTES = 4, 16
"""Bytes of a request for each prompt token (its id) and each block (its hash)."""
_DELAYED_MAX = 100.0
"""Bound of the requests that are counted as delayed by this one. It binds in overload alone."""


@dataclass(frozen=True, slots=True)
class PredictedSeconds:
    """Cost of a request on each worker: seconds until its first token, plus the seconds that it adds to other requests.

    Each worker publishes its own `Prices`, so workers may differ. No term falls where a queue is longer. No term rises where
    more of the prompt is cached.
    """

    name: ClassVar[str] = "kv"
    term_names: ClassVar[tuple[str, ...]] = (
        "queue",
        "kv_wait",
        "onboard",
        "prefill",
        "itl",
        "slowdown",
        "queue_externality",
        "kv_pressure",
        "network",
        "slo_violation",
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
            _itl_weight(context),
            *_targets(context),
            _BUSY_PERIOD,
            _DELAYED_MAX,
            TOKEN_S_MIN,
            _request_bytes(context),
        )
        return _with_places(terms, context)


def terms_python(context: RoutingContext) -> Column:
    """Give the terms of `PredictedSeconds.terms` without native code: the same numbers to the last bit."""
    return _with_places(_priced(context), context)


_KV_WAIT = PredictedSeconds.term_names.index("kv_wait")


def _with_places(terms: Column, context: RoutingContext) -> Column:
    """Raise `kv_wait` to the wait for a batch slot where that is longer. A request that ends frees both KV blocks and its slot."""
    present = context.running_requests + context.waiting_requests
    if np.count_nonzero(present >= context.prices.batch_requests):  # a third of what `any` takes
        np.maximum(terms[_KV_WAIT], context.batch_wait_s(), out=terms[_KV_WAIT])
    return terms


def _priced(context: RoutingContext) -> Column:
    """Reference of the native `predicted_seconds`: the same numbers to the last bit. 17 workers take 47 us, natively 5 us."""
    prices, size, output = context.prices, context.block_size, max(context.mean_output_tokens, 1.0)
    own_output = max(context.own_output_tokens, 1.0)
    running, total = context.running_requests, context.total_blocks
    step_s = context.step_s()
    # A step that prefills decodes as well: its decode time is spread over the prompt tokens that fit into the step. Where
    # data-parallel ranks compute a prompt each, a prompt bears one rank's part.
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

    # KV blocks that are lacking have to be freed first. All blocks are freed once in the time of one answer.
    growing = (running + context.waiting_requests) * (output / 2 / size)
    asked = context.active_blocks + queued / size + growing
    new_blocks = context.request_blocks - context.tier_blocks[0]
    asked += new_blocks
    of_all = np.where(total > 0, 1.0, 0.0) / np.maximum(total, 1)
    answer_s = output * step_s
    kv_wait = np.maximum(asked - total, 0.0) * of_all * answer_s

    # Each decoding request is delayed by this prefill once, and by one more sequence in every step of this request's answer.
    more_s = prices.decode_sequence_s + (context.request_tokens + own_output / 2) * prices.decode_token_s
    weight = _itl_weight(context)
    slowdown = weight * running * (prefill / output + more_s * (own_output / output))

    # Requests arrive at a worker in proportion to its speed. This request keeps one rank busy. Requests that arrive meanwhile
    # are routed too, so each waits at most as long as at the median worker.
    speed = context.eligible * ranks / np.maximum(prices.prefill_token_s, TOKEN_S_MIN)
    rate_per_s = context.request_rate_per_s * speed / max(float(speed.cumsum()[-1]), 1.0)
    shared = prefill / ranks
    delayed = rate_per_s * _BUSY_PERIOD * (_middle(queue + kv_wait, context) + shared)
    queue_externality = shared * np.minimum(delayed, _DELAYED_MAX)

    # The request holds its blocks for the time of its answer. A request that lacks KV memory meanwhile waits for that part of it.
    # The probability of that is about use^(sqrt(2 (n + 1)) - 1) where n requests fit: use^8 for forty (Sakasegawa 1977).
    # No request waits longer than at the median worker.
    use = np.minimum(asked * of_all, 1.0)
    crowded = np.minimum(use, _middle(use, context))
    crowded *= crowded
    crowded *= crowded
    crowded *= crowded
    wanting_s = np.minimum(kv_wait, _middle(kv_wait, context))
    wanting = np.minimum(rate_per_s * _BUSY_PERIOD * wanting_s, _DELAYED_MAX)
    kv_pressure = new_blocks * of_all * (own_output * step_s) * (_BUSY_PERIOD * crowded + wanting)

    network = prices.round_trip_s + _request_bytes(context) * prices.byte_s

    ttft_s, itl_s = _targets(context)
    slo_violation = _past_target(
        queue + kv_wait + onboard + prefill + network, ttft_s
    ) + weight * _past_target(step_s + more_s, itl_s)
    itl = weight * step_s
    return np.stack(
        (
            queue,
            kv_wait,
            onboard,
            prefill,
            itl,
            slowdown,
            queue_externality,
            kv_pressure,
            network,
            slo_violation,
        )
    )


def _middle(column: Column, context: RoutingContext) -> float:
    """Give the lower median over the eligible workers; a stuck or an idle worker does not move it."""
    eligible = column[context.eligible]
    if not len(eligible):
        return 0.0
    at = (len(eligible) - 1) // 2
    return float(np.partition(eligible, at)[at])


def _request_bytes(context: RoutingContext) -> float:
    """Estimate the size of the request's message."""
    return float(_TOKEN_BYTES * context.request_tokens + _HASH_BYTES * context.request_blocks)


def _targets(context: RoutingContext) -> tuple[float, float]:
    """Give the targets for TTFT and ITL in seconds; infinite where the client names none."""
    ttft_s, itl_s = context.slo_ttft_s, context.slo_itl_s
    return math.inf if ttft_s is None else ttft_s, math.inf if itl_s is None else itl_s


def _itl_weight(context: RoutingContext) -> float:
    """Give the seconds of TTFT that one second of ITL is worth to this request."""
    ttft_s, itl_s = context.slo_ttft_s, context.slo_itl_s
    if context.prompt_only:
        return 0.0  # a prefill worker decodes nothing
    if ttft_s is None or itl_s is None:
        return ITL_WEIGHT
    low, high = _ITL_WEIGHTS
    return min(max(ttft_s / itl_s, low), high)


def _past_target(predicted_s: Column, target_s: float) -> Column:
    """Give the seconds past a target, at most as many as the target."""
    past_s: Column = np.clip(predicted_s - target_s, 0.0, target_s)
    return past_s


def _queued(context: RoutingContext) -> tuple[Column, Column]:
    """Give the prompt tokens queued on each worker, and the (token, attended token) pairs of these.

    A load report counts waiting prompts whole. The router that sent a prompt knows how much of it was cached. So routers' own
    counts are used for what routers sent, unless the report says that less is left, and the report for the rest.
    """
    queued = context.queued_prefill_tokens
    known = context.own_prefill_tokens + context.peer_prefill_tokens
    left = np.minimum(known, queued)
    requests = np.maximum(context.running_requests + context.waiting_requests, 1)
    others = 1.0 - np.minimum((context.own_requests + context.peer_requests) / requests, 1.0)
    pairs = context.own_prefill_pairs + context.peer_prefill_pairs
    return left + (queued - left) * others, pairs * (left / np.maximum(known, 1))
