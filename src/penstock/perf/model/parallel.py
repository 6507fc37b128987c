"""Parallelism of one engine over its devices."""

from collections.abc import Iterator

from pydantic import PositiveInt

from penstock.core.config import Config
from penstock.perf.model.hardware import Hardware
from penstock.perf.model.shape import ModelShape

_WIDE_DEVICES = (4, 8, 16, 32, 64, 72, 144)


class Parallel(Config):
    """Parallelism of one engine: `tp * pp * dp` devices; experts are split over `ep` of a stage's `tp * dp`."""

    tp: PositiveInt = 1
    """Tensor parallelism of attention and dense layers."""
    pp: PositiveInt = 1
    """Pipeline stages; a batch is split into as many micro-batches."""
    ep: PositiveInt = 1
    """Devices over which whole experts are distributed: a multiple of `tp` that divides `tp * dp`. 1: each expert is split
        by `tp`."""
    dp: PositiveInt = 1
    """Copies of attention and dense layers, each with its own sequences and KV. With `ep` they share the experts (wide expert
        parallelism); without, they are independent."""

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp


def parallelisms(shape: ModelShape, hardware: Hardware, *, devices_max: int) -> Iterator[Parallel]:
    """Yield common parallelisms for a model: tensor, tensor x pipeline, and wide expert parallelism.

    Tensor parallelism stays within an NVLink domain. Independent copies are replicas, so they are not yielded.
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
