"""Measured speeds of a route, kept as factors on the transport's own cost estimate.

Small and large transfers have separate factors: start-up dominates small ones, bandwidth large ones. A factor moves by a
fixed step towards each measurement, so one hiccup moves it little. A transfer much faster than expected is no hiccup and
halves the factor. Slowness fades with time, since a route that is not chosen is not measured.
"""

from penstock.core.descriptors import TransferCost, TransferOp

_STEP = 1.1
"""A factor is multiplied or divided by this per transfer; a factor of 2 is learned within 8 transfers."""
_STEP_DOWN = 2.0
_FACTOR_MAX = 64.0
_SMALL_BYTES = 256 << 10
_HALF_LIFE_S = 5.0
"""Seconds in which the logarithm of a factor above 1 halves without a transfer."""
_FADES_AFTER_S = 0.1
_NOTHING_LEARNED = 1.0, 0.0


class Speeds:
    """The factors of one channel."""

    def __init__(self) -> None:
        """Begin with all factors at 1."""
        self._factors: dict[tuple[TransferOp, bool], tuple[float, float]] = {}  # with when each was learned

    def factor(self, op: TransferOp, num_bytes: int, now_s: float) -> float:
        """Give the factor for a transfer of this size: measured seconds over estimated seconds."""
        factor, at_s = self._factors.get((op, num_bytes <= _SMALL_BYTES), _NOTHING_LEARNED)
        if factor <= 1.0 or now_s - at_s < _FADES_AFTER_S:
            return factor
        return float(factor ** (0.5 ** ((now_s - at_s) / _HALF_LIFE_S)))

    def learn(
        self, op: TransferOp, cost: TransferCost, num_bytes: int, ranges: int, *, took_s: float, now_s: float
    ) -> None:
        """Learn from the seconds of a finished transfer."""
        factor = self.factor(op, num_bytes, now_s)
        seen = took_s / cost.seconds(num_bytes, ranges)
        if seen > factor:
            factor *= _STEP
        else:
            factor /= _STEP_DOWN if seen < factor / _STEP_DOWN else _STEP
        self._factors[op, num_bytes <= _SMALL_BYTES] = min(max(factor, 1 / _FACTOR_MAX), _FACTOR_MAX), now_s
