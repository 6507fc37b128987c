"""How to spread a model over devices: tries parallelisms and batches against latency targets, by the model's prices.

What comes out holds in steady state, with evenly spread load and no queue but the one stated: an upper bound
for a simulation to test, and the place to start one from.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.perf.hardware import Hardware
from penstock.perf.parallel import Parallel
from penstock.perf.roofline import Roofline
from penstock.perf.shape import ModelShape

PREFILL_BUSY = 0.8
"""Share of the time that prefill workers compute; the rest is what arrivals leave idle."""
_ABOUT_AS_GOOD = 1.03
_WIDE_DEVICES = (4, 8, 16, 32, 64, 72, 144)
_PROMPTS_MAX = 64

Price = Callable[[Parallel], Roofline]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What every request asks, and how fast it must be answered."""

    input_tokens: int
    output_tokens: int
    ttft_s: float
    itl_s: float
    percentile: float = 90.0
    """Share of requests that must keep both, in percent; only where queueing is taken into account."""

    @property
    def context_tokens(self) -> float:
        """Mean context of a sequence while it is decoded."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Workers of one kind, at the largest load within the targets."""

    parallel: Parallel
    batch: int
    """Sequences that decode at once, or prompts computed at once, in one worker."""
    requests_per_s: float
    """Of one worker."""
    latency_s: float
    """Between two tokens of a sequence, or from a prompt's arrival to its first token."""

    @property
    def device_s_per_request(self) -> float:
        return self.parallel.devices / self.requests_per_s


def parallelisms(shape: ModelShape, hardware: Hardware, *, devices_max: int) -> Iterator[Parallel]:
    """Yield the parallelisms in use for such a model: tensor, tensor x pipeline, and wide expert parallelism.

    Tensor parallelism stays within an NVLink domain. Copies side by side that share nothing are replicas and
    not yielded.
    """
    widest = min(hardware.scale_up_devices, shape.heads, devices_max, 16)
    tensor = [1 << power for power in range(widest.bit_length())]
    for tp in tensor:
        yield Parallel(tp=tp)
        if shape.moe is not None and 1 < tp <= shape.moe.num_experts:
            yield Parallel(tp=tp, ep=tp)
    for pp in (2, 4):
        if tensor[-1] * pp <= devices_max:
            yield Parallel(tp=tensor[-1], pp=pp)
    if shape.moe is None:
        return
    for devices in _WIDE_DEVICES:
        for tp in tensor:
            if devices <= min(devices_max, shape.moe.num_experts) and devices % tp == 0 and devices > tp:
                yield Parallel(tp=tp, dp=devices // tp, ep=devices)


def place_decode(price: Price, choices: Iterable[Parallel], demand: Demand) -> Placement | None:
    """Find the decode workers that need the fewest devices for the demand, prompts computed elsewhere."""

    def step_s(model: Roofline, batch: int) -> float:
        return model.decode_step_s(batch, round(batch * demand.context_tokens))

    return _best(_largest(model, demand, step_s) for model in _priced(price, choices))


def place_aggregated(price: Price, choices: Iterable[Parallel], demand: Demand) -> Placement | None:
    """Find the workers that need the fewest devices to run whole requests, prompts beside decoding.

    A prompt is computed in one step, on one copy of the attention; the time to the first token is two such steps.
    """

    def mixed_s(model: Roofline, batch: int, prompts: int) -> float:
        chunks = [(demand.input_tokens, 0)] * prompts
        return model.mixed_step_s(chunks, batch, round(batch * demand.context_tokens))

    def step_s(model: Roofline, batch: int) -> float:
        prompts = (
            batch * model.tokens_per_step / demand.output_tokens
        )  # that a step has to compute, on average
        few, more = (mixed_s(model, batch, n) for n in (math.floor(prompts), math.floor(prompts) + 1))
        if 2 * more > demand.ttft_s:
            return math.inf
        return few + (more - few) * (prompts % 1)

    return _best(_largest(model, demand, step_s) for model in _priced(price, choices))


def place_prefill(price: Price, choices: Iterable[Parallel], demand: Demand) -> Placement | None:
    """Find the prefill workers that need the fewest devices: a prompt waits for one batch and is computed in the next."""
    found = []
    for model in _priced(price, choices):
        for batch in range(model.parallel.dp, model.parallel.dp * _PROMPTS_MAX + 1, model.parallel.dp):
            batch_s = model.prefill_batch_s([(demand.input_tokens, 0)] * batch)
            fits = batch * demand.input_tokens <= model.kv_capacity_tokens
            if 2 * batch_s > demand.ttft_s or not fits:
                break
            found.append(
                Placement(
                    parallel=model.parallel,
                    batch=batch,
                    requests_per_s=PREFILL_BUSY * batch / batch_s,
                    latency_s=2 * batch_s,
                )
            )
    return _best(found)


def _priced(price: Price, choices: Iterable[Parallel]) -> Iterator[Roofline]:
    """Yield the engines whose weights fit."""
    for parallel in choices:
        try:
            model = price(parallel)
            if model.kv_capacity_tokens > 0:
                yield model
        except ConfigError:
            continue


def _largest(model: Roofline, demand: Demand, step_s: Callable[[Roofline, int], float]) -> Placement | None:
    """Find the largest batch whose KV fits and whose steps are short enough."""
    low, high = 0, model.kv_capacity_tokens // (demand.input_tokens + demand.output_tokens)
    while low < high:
        middle = (low + high + 1) // 2
        if step_s(model, middle) <= demand.itl_s * model.tokens_per_step:
            low = middle
        else:
            high = middle - 1
    if not low:
        return None
    seconds = step_s(model, low) / model.tokens_per_step
    return Placement(
        parallel=model.parallel,
        batch=low,
        requests_per_s=low / (seconds * demand.output_tokens),
        latency_s=seconds,
    )


def _best(placements: Iterable[Placement | None]) -> Placement | None:
    """Take the fewest devices a request; of those about as good, the smallest worker."""
    found = [placement for placement in placements if placement is not None]
    if not found:
        return None
    enough = _ABOUT_AS_GOOD * min(placement.device_s_per_request for placement in found)
    close = [placement for placement in found if placement.device_s_per_request <= enough]
    return min(close, key=lambda placement: (placement.parallel.devices, placement.device_s_per_request))
