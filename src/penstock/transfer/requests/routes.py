"""Routes to a peer, one for each transport, and the choice between them: the lowest expected time."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.core.descriptors import TransferCost, TransferOp
from penstock.seams import Storage, TransferChannel, Transport

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


_REST_S, _REST_S_MAX = 1.0, 60.0
"""Seconds that a failed route is not used if another one can do it; doubled after each further failure."""
_PASSED_OVER, _PASSED_OVER_MAX = 32, 1024
"""Transfers after which a route that is slower than its own estimate is tried again; doubled each time."""


_NEVER_S = float("inf")


@dataclass(slots=True, eq=False)
class Route:
    """One transport to a peer, or one storage of the agent itself, with what was measured of it."""

    name: str
    channel: TransferChannel | Storage
    transport: Transport | Storage
    speeds: Speeds = field(default_factory=Speeds)
    rests_until_s: float = 0.0
    is_set_up: bool = field(init=False)
    """Whether its first transfer is over, or it needs no set-up."""
    _forgone_s: float = field(default=0.0, init=False)
    _failures: int = field(default=0, init=False)
    _passed_over: int = field(default=0, init=False)
    _patience: int = field(default=_PASSED_OVER, init=False)

    def __post_init__(self) -> None:
        self.is_set_up = not any(self.channel.cost(op).setup_s for op in TransferOp)

    @property
    def checksums(self) -> bool:
        """Whether checksums are on by default."""
        return self.transport.checksums

    def seconds(self, op: TransferOp, num_bytes: int, ranges: int, now_s: float) -> float:
        """Estimate the seconds of a transfer, with what is left of the set-up charge."""
        moving_s = self.channel.cost(op).seconds(num_bytes, ranges) * self.speeds.factor(op, num_bytes, now_s)
        return moving_s if self.is_set_up else moving_s + self.setup_left_s(op)

    def forgo(self, other_s: float, own_s: float) -> None:
        """Note a transfer that took another route of `other_s`; once set up, this route would have taken `own_s`."""
        self._forgone_s += max(0.0, other_s - own_s)

    def setup_left_s(self, op: TransferOp) -> float:
        """The set-up seconds charged to the next transfer: the set-up less what earlier transfers lost on slower routes.

        So transfers lose at most one set-up in total before the route is used.
        """
        return 0.0 if self.is_set_up else max(0.0, self.channel.cost(op).setup_s - self._forgone_s)

    def worked(self) -> None:
        """Note a transfer that succeeded."""
        self.is_set_up = True
        self._failures = 0
        self.rests_until_s = 0.0

    def failed(self, now_s: float) -> None:
        """Note a transfer that the transport failed."""
        self.rests_until_s = now_s + min(_REST_S * 2**self._failures, _REST_S_MAX)
        self._failures = min(self._failures + 1, 16)

    def passed_over(self) -> bool:
        """Count a transfer that another route got although this route's own estimate is the lowest.

        Returns:
            whether to use it for this transfer all the same, to measure it anew.
        """
        self._passed_over += 1
        if self._passed_over < self._patience:
            return False
        self._passed_over = 0
        self._patience = min(2 * self._patience, _PASSED_OVER_MAX)
        return True

    def chosen(self) -> None:
        """Note that it was chosen as the best."""
        if self._patience != _PASSED_OVER or self._passed_over:
            self._passed_over, self._patience = 0, _PASSED_OVER


def choose(
    routes: Sequence[Route], op: TransferOp, num_bytes: int, ranges: int, now_s: float
) -> tuple[Route, dict[str, float]]:
    """Choose one of at least one route.

    Returns:
        the route, and the expected seconds by transport.
    """
    expected: dict[str, float] = {}
    best, least_s, cold = None, _NEVER_S, None
    favourite, thought_s = None, _NEVER_S  # by the estimates alone
    for route in routes:
        own_s = route.channel.cost(op).seconds(num_bytes, ranges)
        seconds = own_s * route.speeds.factor(op, num_bytes, now_s)
        if not route.is_set_up:
            cold, cold_s = route, seconds
            seconds += route.setup_left_s(op)
        elif own_s < thought_s and route.rests_until_s <= now_s:
            favourite, thought_s = route, own_s
        expected[route.name] = seconds
        if seconds < least_s and route.rests_until_s <= now_s:
            best, least_s = route, seconds
    if best is None:
        return min(routes, key=lambda route: route.rests_until_s), expected
    if cold is not None and cold is not best:
        cold.forgo(least_s, cold_s)
    if favourite is best:
        best.chosen()
    elif favourite is not None and thought_s < least_s and favourite.passed_over():
        return favourite, expected
    return best, expected


def next_of(
    routes: Iterable[Route], tried: Container[str], expected: dict[str, float], now_s: float
) -> Route | None:
    """Give the best route that was not tried; routes that failed lately come last. None if all were tried."""
    left = [route for route in routes if route.name not in tried]
    return min(left, key=lambda route: (route.rests_until_s > now_s, expected[route.name]), default=None)
