"""What requests see of a few workers that are alike, at a rate: queueing included, by the model's prices, in closed form.

One description holds for workers that run whole requests, for those that run prompts alone and for those that take
prompts over: they differ in how many tokens of a prompt are computed there, and how many of an answer.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from penstock.perf.roofline.roofline import Roofline
from penstock.perf.roofline.speculation import price_per_token
from penstock.perf.search.demand import Demand
from penstock.perf.search.queueing import wait_s

_HOPELESS = 1e-5
"""Below this part of what could be at best, a rate is none."""
_PROMPTS_MAX = 16
"""In one step, on each data-parallel rank."""
_PRECISION = 2e-3
"""Of a largest rate, relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a pool does of every request."""

    new_tokens: int
    """Prompt tokens computed here, of a request whose prompt is."""
    cached_tokens: int
    """Prompt tokens whose KV is brought here."""
    answer_tokens: int
    """Tokens generated here, one at a step of the whole batch."""
    computed: float = 1.0
    """Of the requests, those whose prompt is computed here."""

    @property
    def held_tokens(self) -> int:
        """KV of a request that ends."""
        return self.new_tokens + self.cached_tokens + self.answer_tokens

    @property
    def context_tokens(self) -> float:
        """Mean context of a sequence while it is decoded."""
        return self.new_tokens + self.cached_tokens + self.answer_tokens / 2


def whole(demand: Demand) -> Share:
    """Give the share of a worker that runs whole requests."""
    return Share(
        new_tokens=demand.input_tokens, cached_tokens=0, answer_tokens=demand.output_tokens - 1
    )  # the prompt's last step yields the first token


def prompts(demand: Demand) -> Share:
    """Give the share of a worker that runs prompts and hands them over."""
    return Share(new_tokens=demand.input_tokens, cached_tokens=0, answer_tokens=0)


def answers(demand: Demand, block_size: int, local: float = 0.0) -> Share:
    """Give the share of a worker that takes prompts over: a last, partial block is computed again.

    `local` of the requests have their whole prompt computed here all the same.
    """
    again = (demand.input_tokens - 1) % block_size + 1
    new = demand.input_tokens if local else again
    return Share(
        new_tokens=new,
        cached_tokens=demand.input_tokens - new,
        answer_tokens=demand.output_tokens - 1,
        computed=local + (1 - local) * again / new,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """At the demand's percentile."""

    ttft_s: float
    """From a request's arrival here until its prompt is computed."""
    itl_s: float
    """Between two tokens of a stream, mean over the stream; 0 where none are generated."""
    kv_share: float
    """Of a worker's KV, what running requests hold."""
    batch: float = 0.0
    """Sequences that decode at once in a worker, on average."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers that are alike, each with an even part of the requests.

    model:            prices of one worker
    workers:          how many
    max_batch_tokens: tokens that a step computes at most on each data-parallel rank
    """

    model: Roofline
    workers: int
    max_batch_tokens: int

    def predict(self, share: Share, rate_per_s: float, percentile: float) -> Prediction | None:
        """Say what requests see when so many come each second, to all workers together; None where that is too much."""
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
        """Find the largest rate that keeps the demand's targets, and what requests see of it; None where none does."""
        room = self._room(share)
        low, high = 0.0, 1.0
        found = None
        while high - low > _PRECISION * high and high > _HOPELESS:
            middle = (low + high) / 2
            state = self._state(share, middle, room)
            seen = None if state is None else self._seen(share, state, demand.percentile, room)
            if state is not None and seen is not None and keeps(seen, demand):
                low, found = middle, (self.workers * state.each_per_s, seen)
            else:
                high = middle
        return found

    def _seen(self, share: Share, state: "_State", percentile: float, room: float) -> Prediction | None:
        """Say what requests see of a state; None where it cannot last."""
        if state.load >= 1:
            return None
        z = NormalDist().inv_cdf(percentile / 100)
        prompts_per_s, batch = state.each_per_s * share.computed, state.batch
        queue_s = wait_s(state.service_s, self.workers, state.load, percentile / 100)
        under_way_s = state.busy * state.mixed_s + (1 - state.busy) * state.decode_s
        # Who waited is computed beside others who did.
        others_s = min(prompts_per_s * queue_s, state.others_max) * state.other_s
        ttft_s = queue_s + under_way_s + state.prompt_s + others_s
        crowd = batch + z * math.sqrt(batch) + prompts_per_s * ttft_s
        if crowd > room:
            return None
        unlucky = state.busy
        if batch:  # prompts that come meanwhile, more than on average
            stream_s = share.answer_tokens * state.mean_s(state.busy)
            unlucky += z * state.prompt_s * math.sqrt(prompts_per_s / stream_s)
        return Prediction(
            ttft_s=ttft_s,
            itl_s=state.mean_s(min(unlucky, 1.0)) if batch else 0.0,
            kv_share=crowd / room,
            batch=batch,
        )

    def _room(self, share: Share) -> float:
        """Count the requests whose KV fits into a worker."""
        return self.model.kv_capacity_tokens / share.held_tokens

    def _state(self, share: Share, level: float, fits: float) -> "_State | None":
        """Describe a worker whose batch is this part of the requests that fit, or that spends this part of its time where it only computes prompts.

        A worker's time goes into steps that carry prompt tokens and steps that do not; a stream gets a token from each. One
        prompt a step while that is enough; else as many as come meanwhile, the price being linear in between.
        """
        model = price_per_token(self.model)
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
        steps = share.computed * pieces  # that carry its prompt, of each request
        mixed_s = one_s
        if batch:
            # batch = rate x tokens x mean step, and of a second the part rate x steps x mixed goes into mixed steps.
            tokens = share.answer_tokens
            each_per_s = batch / decode_s / (tokens + batch * steps * (one_s / decode_s - 1))
            if each_per_s * steps * one_s > 1:  # each step carries prompts: all that came during the last one
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
    """A worker at some load."""

    each_per_s: float
    """Requests that it gets."""
    batch: float
    """Sequences that decode at once."""
    mixed_s: float
    """A step with prompt tokens."""
    decode_s: float
    """One without; 0 where nothing is generated."""
    prompt_s: float
    """The steps of one prompt."""
    other_s: float
    """What another prompt adds to them that is computed beside it."""
    others_max: int
    """How many there may be."""
    service_s: float
    """What a prompt takes of a worker that computes as many at once as it may."""
    busy: float
    """Share of the time that goes into steps with prompt tokens."""
    load: float
    """Share of what prompts can take of the worker at most."""

    def mean_s(self, busy: float) -> float:
        """Give the mean time of a step, where the share `busy` of the time goes into steps with prompts."""
        if not self.decode_s:
            return self.mixed_s
        return 1 / (busy / self.mixed_s + (1 - busy) / self.decode_s)


def keeps(prediction: Prediction, demand: Demand) -> bool:
    """Say whether both targets are met."""
    return prediction.ttft_s <= demand.ttft_s and prediction.itl_s <= demand.itl_s
