"""Closed-form TTFT and ITL of equal workers at a request rate, queueing included.

One model covers aggregated, prefill and decode workers: they differ in how many prompt and output tokens of a request
they compute (`Share`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from penstock.perf.model_shape import Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Token counts of each request, and latency targets."""

    input_tokens: int
    output_tokens: int
    ttft_s: float
    itl_s: float
    percentile: float = 90.0
    """Share of requests that must meet each target, in percent."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache of whoever computes the prompt."""
    input_spread: float = 1.0
    """Mean square of the lengths of prompts over the square of their mean; 1 if all are equal."""
    output_spread: float = 1.0
    """Likewise of answers."""

    @property
    def context_tokens(self) -> float:
        """Mean context of a sequence during decode, in tokens."""
        return self.input_tokens + self.output_spread * self.output_tokens / 2


def wait_s(service_s: float, servers: int, busy: float, share: float) -> float:
    """Give a quantile of the waiting time for Poisson arrivals that join the shortest queue.

    Args:
        service_s: constant service time.
        servers: number of servers.
        busy: utilization; from 1 on the result is infinite.
        share: the quantile, such as 0.9.

    Source: Sakasegawa (1977) for the odds of waiting, `busy ** (sqrt(2 (servers + 1)) - 1)`; halved mean for equal
    service (Allen and Cunneen); an exponential tail. Exact to a few percent for one server; joining the shortest of several queues is nearly one
    queue.
    """
    if busy >= 1:
        return math.inf
    waits = busy ** (math.sqrt(2 * (servers + 1)) - 1)
    if waits <= 1 - share:
        return 0.0
    return service_s / (2 * servers * (1 - busy)) * math.log(waits / (1 - share))


_HOPELESS = 1e-5
"""Rates below this fraction of the upper bound count as 0."""
_PROMPTS_MAX = 16
"""Most prompts in one step on each data-parallel rank."""
_PRECISION = 2e-3
"""Relative precision of a largest rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of each request that a pool computes."""

    new_tokens: int
    """Prompt tokens computed here, if the prompt is computed here."""
    cached_tokens: int
    """Prompt tokens whose KV is transferred here."""
    answer_tokens: int
    """Output tokens decoded here."""
    computed: float = 1.0
    """Fraction of requests whose prompt is computed here."""
    prompt_spread: float = 1.0
    """Mean square over squared mean of prompt lengths; queues grow with it."""
    answer_spread: float = 1.0
    """Likewise of answers; a running request is likelier one with a long answer."""

    @property
    def held_tokens(self) -> int:
        """KV tokens of a request at its end."""
        return self.new_tokens + self.cached_tokens + self.answer_tokens

    @property
    def context_tokens(self) -> float:
        """Mean context of a sequence during decode, in tokens."""
        return self.new_tokens + self.cached_tokens + self.answer_spread * self.answer_tokens / 2


def aggregated_share(demand: Demand) -> Share:
    """Make the share of an aggregated worker."""
    return _whole_prompt(demand, demand.output_tokens - 1)  # the last prefill step yields the first token


def prefill_share(demand: Demand) -> Share:
    """Make the share of a prefill worker."""
    return _whole_prompt(demand, 0)


def _whole_prompt(demand: Demand, answer_tokens: int) -> Share:
    new = max(demand.input_tokens - demand.cached_tokens, 1)
    return Share(
        new_tokens=new,
        cached_tokens=max(demand.input_tokens - new, 0),
        answer_tokens=answer_tokens,
        prompt_spread=demand.input_spread,
        answer_spread=demand.output_spread,
    )


def decode_share(demand: Demand, block_size: int, local: float = 0.0) -> Share:
    """Make the share of a decode worker: it recomputes the prompt's last, partial block.

    The fraction `local` of requests is prefilled by the decode worker itself.
    """
    again = (demand.input_tokens - 1) % block_size + 1
    new = demand.input_tokens if local else again
    return Share(
        new_tokens=new,
        cached_tokens=demand.input_tokens - new,
        answer_tokens=demand.output_tokens - 1,
        computed=local + (1 - local) * again / new,
        answer_spread=demand.output_spread,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Latencies at the demand's percentile."""

    ttft_s: float
    """Seconds from a request's arrival to the end of its prefill."""
    itl_s: float
    """Mean seconds between two tokens of a stream; 0 for prefill workers."""
    kv_share: float
    """Fraction of a worker's KV held by running requests."""
    batch: float = 0.0
    """Mean number of decoding sequences in a worker."""


class PoolModel(Protocol):
    """What a pool needs of a worker's latency model, whose decode step yields one token per sequence."""

    @property
    def parallel(self) -> Parallel: ...

    @property
    def verified_tokens(self) -> int:
        """Tokens computed per decode step and sequence."""
        ...

    @property
    def kv_capacity_tokens(self) -> int: ...

    def kv_held_tokens(self, tokens: float) -> float: ...

    def decode_step_s(self, batch: int, context_tokens: int) -> float: ...

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class PredictedPool:
    """Equal workers, each with an equal part of the requests.

    model:            latency model of one worker
    workers:          number of workers
    max_batch_tokens: most tokens of a step on each data-parallel rank
    requests_max:     most requests in a worker's batch; None is as many as its KV holds
    """

    model: PoolModel
    workers: int
    max_batch_tokens: int
    requests_max: int | None = None

    def predict(self, share: Share, rate_per_s: float, percentile: float) -> Prediction | None:
        """Predict latencies at `rate_per_s` requests per second over all workers; None if they are overloaded."""
        each_per_s = rate_per_s / self.workers
        room = self._room(share)
        low, high = 0.0, 1.0
        while high - low > _PRECISION * high and high > _HOPELESS:
            middle = (low + high) / 2
            state = self._state(share, middle, room)
            if state is not None and state.each_per_s < each_per_s:
                low = middle
            else:
                high = middle
        state = self._state(share, low or high, room)
        if state is None or state.each_per_s < (1 - 2 * _PRECISION) * each_per_s:
            return None
        return self._seen(share, state, percentile, room)

    def largest(self, share: Share, demand: Demand) -> tuple[float, Prediction] | None:
        """Find the largest rate that meets the targets, and its prediction; None if no rate does."""
        room = self._room(share)
        low, high = 0.0, 1.0
        found = None
        while high - low > _PRECISION * high and high > _HOPELESS:
            middle = (low + high) / 2
            state = self._state(share, middle, room)
            seen = None if state is None else self._seen(share, state, demand.percentile, room)
            if state is not None and seen is not None and meets(seen, demand):
                low, found = middle, (self.workers * state.each_per_s, seen)
            else:
                high = middle
        return found

    def _seen(self, share: Share, state: "_State", percentile: float, room: float) -> Prediction | None:
        """Predict the latencies of a state; None if it is unstable."""
        if state.load >= 1:
            return None
        z = NormalDist().inv_cdf(percentile / 100)
        prompts_per_s, batch = state.each_per_s * share.computed, state.batch
        # Constant prompts wait half as long as exponential ones: the mean wait grows as their mean square.
        queue_s = share.prompt_spread * wait_s(state.service_s, self.workers, state.load, percentile / 100)
        under_way_s = state.busy * state.mixed_s + (1 - state.busy) * state.decode_s
        # Requests that waited are prefilled together with others that waited.
        others_s = min(prompts_per_s * queue_s, state.others_max) * state.other_s
        ttft_s = queue_s + under_way_s + state.prompt_s + others_s
        crowd = batch + z * math.sqrt(batch) + prompts_per_s * ttft_s
        if crowd > room:
            return None
        unlucky = state.busy
        if batch:  # prompts that arrive meanwhile, above their mean
            stream_s = share.answer_tokens * state.mean_s(state.busy)
            unlucky += z * state.prompt_s * math.sqrt(prompts_per_s / stream_s)
        return Prediction(
            ttft_s=ttft_s,
            itl_s=state.mean_s(min(unlucky, 1.0)) if batch else 0.0,
            kv_share=crowd / room,
            batch=batch,
        )

    def _room(self, share: Share) -> float:
        """Count the requests that run in one worker at once."""
        fits = self.model.kv_capacity_tokens / self.model.kv_held_tokens(share.held_tokens)
        return fits if self.requests_max is None else min(fits, self.requests_max)

    def _state(self, share: Share, level: float, fits: float) -> "_State | None":
        """Describe a worker at a load: `level` is the fraction of fitting requests in its batch, for prefill workers the busy fraction of time.

        A worker runs mixed steps (with prompt tokens) and decode steps; each yields one token per stream. A mixed step has
        one prompt while that suffices, else all prompts that arrive during a step; time is linear in between.
        """
        model = self.model
        batch = level * fits if share.answer_tokens else 0.0
        decoding = max(round(batch), 1) if batch else 0
        context = round(decoding * share.context_tokens)
        ranks = self.model.parallel.dp
        budget = self.max_batch_tokens - math.ceil(decoding * self.model.verified_tokens / ranks)
        if budget < 1:
            return None
        chunk = min(budget, share.new_tokens)
        cached = share.cached_tokens + (share.new_tokens - chunk) // 2
        pieces = share.new_tokens / chunk
        most = min(max(budget // share.new_tokens, 1), _PROMPTS_MAX) * ranks
        one_s = model.mixed_step_s([(chunk, cached)], decoding, context)
        all_s = model.mixed_step_s([(chunk, cached)] * most, decoding, context) if most > 1 else one_s
        more_s = (all_s - one_s) / (most - 1) if most > 1 else 0.0
        decode_s = model.decode_step_s(decoding, context) if decoding else 0.0
        steps = share.computed * pieces  # mixed steps per request
        mixed_s = one_s
        if batch:
            # batch = rate x tokens x mean step; mixed steps take the fraction rate x steps x mixed of the time.
            tokens = share.answer_tokens
            each_per_s = batch / decode_s / (tokens + batch * steps * (one_s / decode_s - 1))
            if (
                each_per_s * steps * one_s > 1
            ):  # every step is mixed: it has all prompts that arrived during the last one
                each_per_s = batch / (tokens * (one_s - more_s) + batch * steps * more_s)
        else:
            each_per_s = level * most / (steps * all_s)
        if each_per_s * steps * one_s > 1:
            mixed_s = (one_s - more_s) / (1 - each_per_s * steps * more_s)
        return _State(
            each_per_s=each_per_s,
            batch=batch,
            mixed_s=mixed_s,
            decode_s=decode_s,
            prompt_s=pieces * mixed_s,
            other_s=pieces * more_s,
            others_max=most - 1,
            service_s=pieces * all_s / most,
            busy=min(each_per_s * steps * one_s, 1.0),
            load=each_per_s * steps * all_s / most,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """A worker at a given load."""

    each_per_s: float
    """Requests per second."""
    batch: float
    """Decoding sequences."""
    mixed_s: float
    """Seconds of a mixed step."""
    decode_s: float
    """Seconds of a decode step; 0 for prefill workers."""
    prompt_s: float
    """Seconds of one prompt's steps."""
    other_s: float
    """Seconds that each further prompt in the same steps adds."""
    others_max: int
    """Most further prompts."""
    service_s: float
    """Seconds per prompt at the largest number of prompts per step."""
    busy: float
    """Fraction of time in mixed steps."""
    load: float
    """Fraction of the worker's prefill capacity in use."""

    def mean_s(self, busy: float) -> float:
        """Give the mean step time if mixed steps take the fraction `busy` of the time."""
        if not self.decode_s:
            return self.mixed_s
        return 1 / (busy / self.mixed_s + (1 - busy) / self.decode_s)


def meets(prediction: Prediction, demand: Demand) -> bool:
    """Tell whether a prediction meets both targets."""
    return prediction.ttft_s <= demand.ttft_s and prediction.itl_s <= demand.itl_s
