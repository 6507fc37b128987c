"""What transfers take, learned from those that ended: a factor on each transport's own estimate.

Small and large transfers are corrected apart, as what they wait for differs: the start of a transfer, or bandwidth.
A factor follows the median of what is seen (it moves by a fixed step towards it), so that one hiccup moves it little.
"""

from penstock.core.descriptors import TransferCost, TransferOp

_STEP = 1.1
"""A factor is multiplied or divided by this once per transfer: twice as slow is learned within 8 transfers."""
_FACTOR_MAX = 64.0
_SMALL_BYTES = 256 << 10


class Speeds:
    """The factors of one channel."""

    def __init__(self) -> None:
        """Trust the estimates."""
        self._factors: dict[tuple[TransferOp, bool], float] = {}

    def seconds(self, op: TransferOp, cost: TransferCost, num_bytes: int, ranges: int) -> float:
        """Estimate a transfer."""
        return cost.seconds(num_bytes, ranges) * self._factors.get((op, num_bytes <= _SMALL_BYTES), 1.0)

    def learn(self, op: TransferOp, cost: TransferCost, num_bytes: int, ranges: int, took_s: float) -> None:
        """Take note of what a transfer took."""
        key = (op, num_bytes <= _SMALL_BYTES)
        factor = self._factors.get(key, 1.0)
        factor = factor * _STEP if took_s > factor * cost.seconds(num_bytes, ranges) else factor / _STEP
        self._factors[key] = min(max(factor, 1 / _FACTOR_MAX), _FACTOR_MAX)
