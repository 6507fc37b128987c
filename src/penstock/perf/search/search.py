"""Which workers to make of so many devices: tries parallelisms, counts and step sizes, whole requests and apart.

Ranks by the largest rate that keeps the targets, as `penstock.perf.search.pool` predicts it: milliseconds a layout, so that
all can be tried, and good enough to choose the few that a simulation is worth.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.perf.model.parallel import Parallel
from penstock.perf.roofline.roofline import Roofline
from penstock.perf.roofline.speculation import price_per_token
from penstock.perf.search.demand import Demand
from penstock.perf.search.pool import Pool, Prediction, Share, answers, keeps, prompts, whole

Price = Callable[[Parallel], Roofline]

STEP_TOKENS = (
    64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16_384,
)  # fmt: skip
"""Values of `max_batch_tokens` that are tried."""
_SHARED_STEPS = (192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Of decode workers that compute prompts too."""
_LOCAL = (0.02, 0.04, 0.07, 0.1, 0.13, 0.17, 0.21, 0.26, 0.33, 0.4)
"""Parts of the prompts that decode workers may compute."""
_SHARED_LAYOUTS = 4
"""So many of the best pairs are tried with decode workers that compute prompts."""
_LOWERED = (1.0, 0.998, 0.995, 0.99, 0.98, 0.95)
"""Parts of the rate at which two pools are joined, until one keeps the targets: a prediction is not smooth, as a batch is a whole number."""
_EQUAL = 0.995
"""Rates from this part of each other on are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleGroup:
    """The workers of one role."""

    role: Role
    parallel: Parallel
    workers: int
    max_batch_tokens: int

    @property
    def devices(self) -> int:
        return self.workers * self.parallel.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is made of the devices, at the largest rate that is predicted to keep the targets."""

    role_groups: tuple[RoleGroup, ...]
    rate_per_s: float
    prediction: Prediction
    local: float = 0.0
    """Of the prompts, those that decode workers are taken to compute."""

    @property
    def devices(self) -> int:
        return sum(role_group.devices for role_group in self.role_groups)

    @property
    def is_disaggregated(self) -> bool:
        """Whether prompts are computed on workers of their own."""
        return len(self.role_groups) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """One step size of a pool, at its largest rate."""

    max_batch_tokens: int
    rate_per_s: float
    prediction: Prediction


@dataclass(kw_only=True)
class LayoutSearch:
    """All layouts of one model on so many devices, for one demand.

    price:            of a worker
    choices:          parallelisms of one
    devices:          how many there are, of which some may be left over
    demand:           what requests ask, and the targets
    block_size:       tokens in a KV block
    link_bytes_per_s: how fast KV moves from a prefill worker to a decode worker
    """

    price: Price
    choices: Iterable[Parallel]
    devices: int
    demand: Demand
    block_size: int
    link_bytes_per_s: Callable[[Parallel, Parallel], float]
    _rathers: dict[Parallel, Demand] = field(default_factory=dict)
    _known: dict[tuple[Share, Demand, Parallel, int], list[_Found]] = field(default_factory=dict)

    @cached_property
    def models(self) -> list[Roofline]:
        """Prices of the workers that the weights and one request fit into."""
        return list(self._fitting())

    def aggregated(self) -> list[Layout]:
        """Give workers that run whole requests, of each parallelism at each step size that keeps the targets, the best first."""
        layouts = []
        for model in self.models:
            workers = self.devices // model.parallel.devices
            for found in self._each_size(model, workers, whole(self.demand), self.demand):
                role_group = RoleGroup(
                    role=Role.AGGREGATED,
                    parallel=model.parallel,
                    workers=workers,
                    max_batch_tokens=found.max_batch_tokens,
                )
                layouts.append(
                    Layout(
                        role_groups=(role_group,), rate_per_s=found.rate_per_s, prediction=found.prediction
                    )
                )
        return ranked(layouts)

    def disaggregated(self) -> list[Layout]:
        """Give prompts and answers on workers of their own, of each pair of parallelisms the best counts, the best first.

        Decode workers that have time to spare compute some prompts themselves, as the router has them do.
        """
        if self.demand.output_tokens < 2:
            return []  # a prompt's worker sends the first token itself: nothing is left to hand over
        found = ranked(
            layout
            for prefill in self.models
            for decode in self.models
            for layout in self._pairs(prefill, decode)
        )
        more: dict[tuple[RoleGroup, ...], Layout] = {}
        for layout in found[:_SHARED_LAYOUTS]:
            prefill, decode = layout.role_groups
            for count in (prefill.workers - 1, prefill.workers):
                for shared in self._with_local(prefill.parallel, decode.parallel, count):
                    more[shared.role_groups] = shared
        return ranked([*found, *more.values()])

    def kv_transfer_s(self, prefill: Parallel, decode: Parallel) -> float:
        """Say how long a prompt's KV is on its way."""
        share = answers(self.demand, self.block_size)
        kv_bytes = share.cached_tokens * self.models[0].kv_bytes_per_token
        return kv_bytes / self.link_bytes_per_s(prefill, decode)

    def _fitting(self) -> Iterator[Roofline]:
        needed = self.demand.input_tokens + self.demand.output_tokens
        for parallel in self.choices:
            try:
                model = self.price(parallel)
                if parallel.devices <= self.devices and model.kv_capacity_tokens >= needed:
                    yield model
            except ConfigError:
                continue  # the weights do not fit, or cannot be spread so

    def _pairs(self, prefill: Roofline, decode: Roofline) -> Iterator[Layout]:
        """Yield the counts at which prompts and answers come closest to the same rate, from either side."""
        size, other = prefill.parallel.devices, decode.parallel.devices
        low, high = 1, (self.devices - other) // size
        if high < 1:
            return
        while low < high:  # the most prefill workers that are not more than enough
            middle = (low + high + 1) // 2
            first, second = self._both(prefill, decode, middle)
            if second is None or (first is not None and first.rate_per_s > second.rate_per_s):
                high = middle - 1
            else:
                low = middle
        for count in (low, low + 1):
            layout = self._layout(prefill, decode, count)
            if layout is not None:
                yield layout

    def _both(self, prefill: Roofline, decode: Roofline, count: int) -> tuple[_Found | None, _Found | None]:
        rest = self._rest(prefill.parallel, decode.parallel, count)
        if rest < 1:
            return None, None
        rather = self._rather(decode.parallel)
        return self._prompt_size(prefill, count), self._answer_size(decode, rest, rather)

    def _layout(self, prefill: Roofline, decode: Roofline, count: int) -> Layout | None:
        first, second = self._both(prefill, decode, count)
        if first is None or second is None:
            return None
        rate_per_s = min(first.rate_per_s, second.rate_per_s)
        rest = self._rest(prefill.parallel, decode.parallel, count)
        pools = Pool(prefill, count, first.max_batch_tokens), Pool(decode, rest, second.max_batch_tokens)
        return self._join(*pools, rate_per_s, 0.0)

    def _with_local(self, one: Parallel, other: Parallel, count: int) -> Iterator[Layout]:
        """Yield the layouts in which decode workers compute some prompts, each with the part that serves most."""
        rest = self._rest(one, other, count)
        if count < 1 or rest < 1:
            return
        prefill, decode = self._model(one), self._model(other)
        first = self._prompt_size(prefill, count)
        if first is None:
            return
        rather = self._rather(other)
        for tokens in _SHARED_STEPS:
            best = 0.0, 0.0
            for local in _LOCAL:
                pool = Pool(decode, rest, tokens)
                found = pool.largest(answers(self.demand, self.block_size, local), rather)
                if found is None:
                    break
                relieved_per_s = first.rate_per_s / (1 - local)
                best = max(best, (min(relieved_per_s, found[0]), local))
                if found[0] <= relieved_per_s:
                    break  # more prompts would be too many for them
            if best[0] > first.rate_per_s:
                layout = self._join(Pool(prefill, count, first.max_batch_tokens), pool, *best)
                if layout is not None:
                    yield layout

    def _join(self, first: Pool, second: Pool, rate_per_s: float, local: float) -> Layout | None:
        """Put a prefill and a decode pool together, the latter with a part of the prompts, at most at this rate; None where none keeps the targets."""
        for lowered in _LOWERED:
            layout = self._joined(first, second, lowered * rate_per_s, local)
            if layout is not None and keeps(layout.prediction, self.demand):
                return layout
        return None

    def _joined(self, first: Pool, second: Pool, rate_per_s: float, local: float) -> Layout | None:
        """Describe both pools at this rate; None where one is at its limit."""
        percentile = self.demand.percentile
        other = second.model.parallel
        computed = first.predict(prompts(self.demand), (1 - local) * rate_per_s, percentile)
        share = answers(self.demand, self.block_size, local)
        generated = second.predict(share, rate_per_s, percentile)
        if computed is None or generated is None:
            return None
        role_groups = tuple(
            RoleGroup(
                role=role, parallel=p.model.parallel, workers=p.workers, max_batch_tokens=p.max_batch_tokens
            )
            for role, p in ((Role.PREFILL, first), (Role.DECODE, second))
        )
        prediction = Prediction(
            ttft_s=max(computed.ttft_s, generated.ttft_s if local else 0.0),
            itl_s=generated.itl_s + self.demand.itl_s - self._rather(other).itl_s,
            kv_share=max(computed.kv_share, generated.kv_share),
            batch=generated.batch,
        )
        return Layout(role_groups=role_groups, rate_per_s=rate_per_s, prediction=prediction, local=local)

    def _model(self, parallel: Parallel) -> Roofline:
        return next(model for model in self.models if model.parallel == parallel)

    def _rest(self, prefill: Parallel, decode: Parallel, count: int) -> int:
        """Count the decode workers there is room for beside so many prefill workers."""
        return (self.devices - count * prefill.devices) // decode.devices

    def _rather(self, decode: Parallel) -> Demand:
        """Give the targets of decode workers: a stream's hand-over, by the slowest link, is a part of the time between its tokens."""
        if decode not in self._rathers:
            delay_s = max(self.kv_transfer_s(model.parallel, decode) for model in self.models)
            itl_s = self.demand.itl_s - delay_s / (self.demand.output_tokens - 1)
            self._rathers[decode] = replace(self.demand, itl_s=itl_s)
        return self._rathers[decode]

    def _prompt_size(self, model: Roofline, workers: int) -> _Found | None:
        """Find the smallest step at which prompts alone go about as fast as they can: it holds up the next ones least."""
        close = self._close(model, workers, prompts(self.demand), self.demand)
        return min(close, key=lambda each: each.max_batch_tokens, default=None)

    def _answer_size(self, model: Roofline, workers: int, demand: Demand) -> _Found | None:
        """Find the largest step that keeps the target if a prompt is computed here after all."""
        close = self._close(model, workers, answers(self.demand, self.block_size), demand)

        def keeps_target(found: _Found) -> bool:
            batch = math.ceil(found.prediction.batch)
            new = min(found.max_batch_tokens - batch * model.verified_tokens, demand.input_tokens)
            step_s = price_per_token(model).mixed_step_s(
                [(new, 0)], batch, round(batch * demand.context_tokens)
            )
            return step_s <= demand.itl_s

        kept = list(filter(keeps_target, close))
        if kept:
            return max(kept, key=lambda each: each.max_batch_tokens)
        return min(close, key=lambda each: each.max_batch_tokens, default=None)

    def _close(self, model: Roofline, workers: int, share: Share, demand: Demand) -> list[_Found]:
        """Give the step sizes whose largest rates are about the best."""
        key = (share, demand, model.parallel, workers)
        if key not in self._known:
            found = list(self._each_size(model, workers, share, demand))
            most = max((each.rate_per_s for each in found), default=0.0)
            self._known[key] = [each for each in found if each.rate_per_s >= _EQUAL * most]
        return self._known[key]

    def _each_size(self, model: Roofline, workers: int, share: Share, demand: Demand) -> Iterator[_Found]:
        for tokens in STEP_TOKENS:
            found = Pool(model, workers, tokens).largest(share, demand)
            if found is not None:
                yield _Found(max_batch_tokens=tokens, rate_per_s=found[0], prediction=found[1])
            if tokens * model.parallel.dp >= model.kv_capacity_tokens:
                break


def ranked(layouts: Iterable[Layout]) -> list[Layout]:
    """Put the largest rate first; of equal ones the fewest devices, then the larger steps, which keep prompts shorter."""

    def key(layout: Layout) -> tuple[float, int, Sequence[int]]:
        return (
            -layout.rate_per_s,
            layout.devices,
            [-role_group.max_batch_tokens for role_group in layout.role_groups],
        )

    return sorted(layouts, key=key)
