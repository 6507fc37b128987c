"""How one engine is spread over devices."""

from pydantic import PositiveInt

from penstock.core.config import Config


class Parallel(Config):
    """How one engine is spread over devices: `tp * pp * dp` of them, experts over `ep` of a stage's `tp * dp`."""

    tp: PositiveInt = 1
    """Tensor parallelism of attention and dense layers."""
    pp: PositiveInt = 1
    """Pipeline stages; a batch is cut into as many micro-batches."""
    ep: PositiveInt = 1
    """Devices that share a layer's experts out, each whole: a multiple of `tp` that divides `tp * dp`. 1 shards each
    expert by `tp` instead."""
    dp: PositiveInt = 1
    """Copies of attention and dense layers, each with its own sequences and KV; with `ep` they share the experts
    (wide expert parallelism), without they are engines side by side."""

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp
