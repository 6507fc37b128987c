"""Searches layouts of N devices: parallelisms, worker counts and step sizes, aggregated and disaggregated.

Layouts are ranked by the largest rate that meets the targets, as `penstock.perf.pool` predicts it. A prediction
takes milliseconds, so that all layouts are tried and the best few simulated.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.perf.model_shape import Parallel
from penstock.perf.pool import (
    Demand,
    PredictedPool,
    Prediction,
    Share,
    aggregated_share,
    decode_share,
    meets,
    prefill_share,
)
from penstock.perf.roofline import Roofline, price_per_token

Price = Callable[[Parallel], Roofline]

STEP_TOKENS = (
    64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16_384,
)  # fmt: skip
"""Values of `max_batch_tokens` to try."""
_SHARED_STEPS = (192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Values to try for decode workers that also prefill."""
_LOCAL = (0.02, 0.04, 0.07, 0.1, 0.13, 0.17, 0.21, 0.26, 0.33, 0.4)
"""Fractions of prompts to try for prefill on decode workers."""
_SHARED_LAYOUTS = 4
"""Number of best pairs to try with prefill on decode workers."""
_LOWERED = (1.0, 0.998, 0.995, 0.99, 0.98, 0.95)
"""Fractions of the rate to try for a joined pair until the targets are met: predictions are not smooth, as batches are integers."""
_EQUAL = 0.995
"""Rates within this ratio count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLayout:
    """The workers of one role in a layout."""

    role: Role
    parallel: Parallel
    workers: int
    max_batch_tokens: int

    @property
    def devices(self) -> int:
        return self.workers * self.parallel.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A use of the devices, with the largest rate predicted to meet the targets."""

    role_layouts: tuple[RoleLayout, ...]
    rate_per_s: float
    prediction: Prediction
    local: float = 0.0
    """Fraction of prompts that decode workers prefill."""

    @property
    def devices(self) -> int:
        return sum(role_layout.devices for role_layout in self.role_layouts)

    @property
    def is_disaggregated(self) -> bool:
        """Whether prefill and decode workers are separate."""
        return len(self.role_layouts) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A step size of a pool, with its largest rate."""

    max_batch_tokens: int
    rate_per_s: float
    prediction: Prediction


@dataclass(kw_only=True)
class LayoutSearch:
    """All layouts of one model on N devices for one demand.

    price:            makes the latency model of a worker
    choices:          parallelisms of a worker
    devices:          number of devices; a layout may leave some unused
    demand:           workload and targets
    block_size:       tokens in a KV block
    link_bytes_per_s: bandwidth of KV transfers from a prefill to a decode worker
    """

    price: Price
    choices: Iterable[Parallel]
    devices: int
    demand: Demand
    block_size: int
    link_bytes_per_s: Callable[[Parallel, Parallel], float]
    _decode_demands: dict[Parallel, Demand] = field(default_factory=dict)
    _known: dict[tuple[Share, Demand, Parallel, int], list[_Found]] = field(default_factory=dict)

    @cached_property
    def models(self) -> list[Roofline]:
        """Latency models of the parallelisms that hold the weights and one request."""
        return list(self._fitting())

    def aggregated(self) -> list[Layout]:
        """Give aggregated layouts that meet the targets, for each parallelism and step size, best first."""
        layouts = []
        for model in self.models:
            workers = self.devices // model.parallel.devices
            for found in self._each_size(model, workers, aggregated_share(self.demand), self.demand):
                role_layout = RoleLayout(
                    role=Role.AGGREGATED,
                    parallel=model.parallel,
                    workers=workers,
                    max_batch_tokens=found.max_batch_tokens,
                )
                layouts.append(
                    Layout(
                        role_layouts=(role_layout,), rate_per_s=found.rate_per_s, prediction=found.prediction
                    )
                )
        return ranked(layouts)

    def disaggregated(self) -> list[Layout]:
        """Give disaggregated layouts, with the best worker counts for each pair of parallelisms, best first.

        Decode workers with spare time prefill some prompts, as the router decides at run time.
        """
        if self.demand.output_tokens < 2:
            return []  # the prefill worker sends the only token: no decode
        found = ranked(
            layout
            for prefill in self.models
            for decode in self.models
            for layout in self._pairs(prefill, decode)
        )
        more: dict[tuple[RoleLayout, ...], Layout] = {}
        for layout in found[:_SHARED_LAYOUTS]:
            prefill, decode = layout.role_layouts
            for count in (prefill.workers - 1, prefill.workers):
                for shared in self._with_local(prefill.parallel, decode.parallel, count):
                    more[shared.role_layouts] = shared
        return ranked([*found, *more.values()])

    def kv_transfer_s(self, prefill: Parallel, decode: Parallel) -> float:
        """Give the seconds of one prompt's KV transfer."""
        share = decode_share(self.demand, self.block_size)
        model = self.models[0]
        kv_bytes = model.kv_held_tokens(share.cached_tokens) * model.kv_bytes_per_token
        return kv_bytes / self.link_bytes_per_s(prefill, decode)

    def _fitting(self) -> Iterator[Roofline]:
        needed = self.demand.input_tokens + self.demand.output_tokens
        for parallel in self.choices:
            try:
                model = self.price(parallel)
                if parallel.devices <= self.devices and model.kv_capacity_tokens >= model.kv_held_tokens(
                    needed
                ):
                    yield model
            except ConfigError:
                continue  # the weights do not fit, or cannot be split this way

    def _pairs(self, prefill: Roofline, decode: Roofline) -> Iterator[Layout]:
        """Yield the two worker counts at which the prefill and decode rates are closest."""
        size, other = prefill.parallel.devices, decode.parallel.devices
        low, high = 1, (self.devices - other) // size
        if high < 1:
            return
        while low < high:  # the most prefill workers that do not exceed the decode rate
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
        targets = self._decode_demand(decode.parallel)
        return self._prompt_size(prefill, count), self._answer_size(decode, rest, targets)

    def _layout(self, prefill: Roofline, decode: Roofline, count: int) -> Layout | None:
        first, second = self._both(prefill, decode, count)
        if first is None or second is None:
            return None
        rate_per_s = min(first.rate_per_s, second.rate_per_s)
        rest = self._rest(prefill.parallel, decode.parallel, count)
        pools = (
            PredictedPool(price_per_token(prefill), count, first.max_batch_tokens),
            PredictedPool(price_per_token(decode), rest, second.max_batch_tokens),
        )
        return self._join(*pools, rate_per_s, 0.0)

    def _with_local(self, one: Parallel, other: Parallel, count: int) -> Iterator[Layout]:
        """Yield layouts with some prefill on decode workers, each at its best fraction."""
        rest = self._rest(one, other, count)
        if count < 1 or rest < 1:
            return
        prefill, decode = self._model(one), self._model(other)
        first = self._prompt_size(prefill, count)
        if first is None:
            return
        targets = self._decode_demand(other)
        for tokens in _SHARED_STEPS:
            best = 0.0, 0.0
            for local in _LOCAL:
                pool = PredictedPool(price_per_token(decode), rest, tokens)
                found = pool.largest(decode_share(self.demand, self.block_size, local), targets)
                if found is None:
                    break
                relieved_per_s = first.rate_per_s / (1 - local)
                best = max(best, (min(relieved_per_s, found[0]), local))
                if found[0] <= relieved_per_s:
                    break  # decode workers cannot prefill more
            if best[0] > first.rate_per_s:
                layout = self._join(
                    PredictedPool(price_per_token(prefill), count, first.max_batch_tokens), pool, *best
                )
                if layout is not None:
                    yield layout

    def _join(
        self, first: PredictedPool, second: PredictedPool, rate_per_s: float, local: float
    ) -> Layout | None:
        """Join a prefill and a decode pool, which prefills the fraction `local`, at a rate up to `rate_per_s`; None if no rate meets the targets."""
        for lowered in _LOWERED:
            layout = self._joined(first, second, lowered * rate_per_s, local)
            if layout is not None and meets(layout.prediction, self.demand):
                return layout
        return None

    def _joined(
        self, first: PredictedPool, second: PredictedPool, rate_per_s: float, local: float
    ) -> Layout | None:
        """Make the layout of both pools at a rate; None if one is overloaded."""
        percentile = self.demand.percentile
        other = second.model.parallel
        computed = first.predict(prefill_share(self.demand), (1 - local) * rate_per_s, percentile)
        share = decode_share(self.demand, self.block_size, local)
        generated = second.predict(share, rate_per_s, percentile)
        if computed is None or generated is None:
            return None
        role_layouts = tuple(
            RoleLayout(
                role=role, parallel=p.model.parallel, workers=p.workers, max_batch_tokens=p.max_batch_tokens
            )
            for role, p in ((Role.PREFILL, first), (Role.DECODE, second))
        )
        prediction = Prediction(
            ttft_s=max(computed.ttft_s, generated.ttft_s if local else 0.0),
            itl_s=generated.itl_s + self.demand.itl_s - self._decode_demand(other).itl_s,
            kv_share=max(computed.kv_share, generated.kv_share),
            batch=generated.batch,
        )
        return Layout(role_layouts=role_layouts, rate_per_s=rate_per_s, prediction=prediction, local=local)

    def _model(self, parallel: Parallel) -> Roofline:
        return next(model for model in self.models if model.parallel == parallel)

    def _rest(self, prefill: Parallel, decode: Parallel, count: int) -> int:
        """Count the decode workers on the devices left by `count` prefill workers."""
        return (self.devices - count * prefill.devices) // decode.devices

    def _decode_demand(self, decode: Parallel) -> Demand:
        """Give the targets of decode workers: the KV transfer over the slowest link counts in the time between tokens."""
        if decode not in self._decode_demands:
            delay_s = max(self.kv_transfer_s(model.parallel, decode) for model in self.models)
            itl_s = self.demand.itl_s - delay_s / (self.demand.output_tokens - 1)
            self._decode_demands[decode] = replace(self.demand, itl_s=itl_s)
        return self._decode_demands[decode]

    def _prompt_size(self, model: Roofline, workers: int) -> _Found | None:
        """Find the smallest step of prefill workers with about the best rate: it delays the next prompts least."""
        close = self._close(model, workers, prefill_share(self.demand), self.demand)
        return min(close, key=lambda each: each.max_batch_tokens, default=None)

    def _answer_size(self, model: Roofline, workers: int, demand: Demand) -> _Found | None:
        """Find the largest step of decode workers that meets the target when they prefill a prompt."""
        close = self._close(model, workers, decode_share(self.demand, self.block_size), demand)

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
        """Give the step sizes with about the best rate."""
        key = (share, demand, model.parallel, workers)
        if key not in self._known:
            found = list(self._each_size(model, workers, share, demand))
            most = max((each.rate_per_s for each in found), default=0.0)
            self._known[key] = [each for each in found if each.rate_per_s >= _EQUAL * most]
        return self._known[key]

    def _each_size(self, model: Roofline, workers: int, share: Share, demand: Demand) -> Iterator[_Found]:
        for tokens in STEP_TOKENS:
            found = PredictedPool(price_per_token(model), workers, tokens).largest(share, demand)
            if found is not None:
                yield _Found(max_batch_tokens=tokens, rate_per_s=found[0], prediction=found[1])
            if tokens * model.parallel.dp >= model.kv_capacity_tokens:
                break


def ranked(layouts: Iterable[Layout]) -> list[Layout]:
    """Sort by rate, largest first; equal rates by fewest devices, then by larger steps, which prefill faster."""

    def key(layout: Layout) -> tuple[float, int, Sequence[int]]:
        return (
            -layout.rate_per_s,
            layout.devices,
            [-role_layout.max_batch_tokens for role_layout in layout.role_layouts],
        )

    return sorted(layouts, key=key)
