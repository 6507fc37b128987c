"""What transfers take, learned from those that ended: a factor on each transport's own estimate.

Small and large transfers are corrected apart, as what they wait for differs: the start of a transfer, or bandwidth.
A factor follows the median of what is seen (it moves by a fixed step towards it), so that one hiccup moves it little. A
transfer that is much faster than thought is no hiccup, and moves it more. What was learned of slowness fades, since who is
not chosen has no other way to be known better.
"""

from penstock.core.descriptors import TransferCost, TransferOp

_STEP = 1.1
"""A factor is multiplied or divided by this once per transfer: twice as slow is learned within 8 transfers."""
_STEP_DOWN = 2.0
_FACTOR_MAX = 64.0
_SMALL_BYTES = 256 << 10
_HALF_LIFE_S = 5.0
"""The logarithm of a factor above 1 halves in so long without a transfer."""
_FADES_AFTER_S = 0.1
_NOTHING_LEARNED = 1.0, 0.0


class Speeds:
    """The factors of one channel."""

    def __init__(self) -> None:
        """Trust the estimates."""
        self._factors: dict[tuple[TransferOp, bool], tuple[float, float]] = {}  # with when each was learned

    def factor(self, op: TransferOp, num_bytes: int, now_s: float) -> float:
        """Give how many times longer than its own estimate a transfer of this size takes."""
        factor, at_s = self._factors.get((op, num_bytes <= _SMALL_BYTES), _NOTHING_LEARNED)
        if factor <= 1.0 or now_s - at_s < _FADES_AFTER_S:
            return factor
        return float(factor ** (0.5 ** ((now_s - at_s) / _HALF_LIFE_S)))

    def learn(
        self, op: TransferOp, cost: TransferCost, num_bytes: int, ranges: int, *, took_s: float, now_s: float
    ) -> None:
        """Take note of what a transfer took."""
        factor = self.factor(op, num_bytes, now_s)
        seen = took_s / cost.seconds(num_bytes, ranges)
        if seen > factor:
            factor *= _STEP
        else:
            factor /= _STEP_DOWN if seen < factor / _STEP_DOWN else _STEP
        self._factors[op, num_bytes <= _SMALL_BYTES] = min(max(factor, 1 / _FACTOR_MAX), _FACTOR_MAX), now_s
