"""Python reference of the native `ReuseTable`: how likely blocks are used again, learned from what was.

A class is the number of uses, the depth and the kind of use of a block; its age is counted in blocks that were evicted
since the last use, or taken for the first time, which would be evictions in a full pool. The index of a class at an age is the most uses that a block can be expected to bring per eviction
that it stays from then on, the Gittins index of its residual time.

Source: J. C. Gittins, Bandit Processes and Dynamic Allocation Indices, 1979.
"""

from bisect import bisect_left

AGES = 32
"""Octaves of age."""
KINDS = 3
DEPTHS = 6
_USES_MAX = (1, 2, 3, 4, 6, 9, 16)
_CLASSES = (len(_USES_MAX) + 1) * DEPTHS * KINDS
_SHALLOW_BITS = 11
"""The first class of depth has 2,048 tokens, each next one twice as many."""
_NEW = 64
"""Counted blocks until a class's index is computed anew."""
_PRIOR = 20.0
"""A class has the pooled rate until it saw more than about so many blocks of an age."""
_UNKNOWN = 0.05
"""Rate of reuse in an octave of age of which nothing is known."""
_KEPT = 0.8
"""What an epoch leaves of what was counted before."""
_EPOCH_MIN = 8192

_WIDTHS = (1.0, *(float(1 << octave) for octave in range(AGES - 1)))


class ReuseTable:
    """Rates of reuse by class and age."""

    def __init__(self, num_blocks: int) -> None:
        self._epoch = max(_EPOCH_MIN, num_blocks // 2)
        self._num_events = 0
        self._reused, self._watched = _zeros(_CLASSES), _zeros(_CLASSES)
        self._pooled_reused, self._pooled_watched = _zeros(len(_USES_MAX) + 1), _zeros(len(_USES_MAX) + 1)
        self._num_new = [0] * _CLASSES
        self._index = [self._computed(0)] * _CLASSES

    @staticmethod
    def class_of(uses: int, depth_tokens: int, kind: int) -> int:
        """Return the class of a block that was used `uses` times and starts at token `depth_tokens`."""
        by_depth = min(DEPTHS - 1, (depth_tokens >> _SHALLOW_BITS).bit_length())
        return (bisect_left(_USES_MAX, uses) * DEPTHS + by_depth) * KINDS + kind

    def add(self, cls: int, watched: int, evictions: int, *, is_reused: bool) -> int:
        """Count a block of a class that was used again after so many evictions, or was not until now.

        Args:
            cls: its class.
            watched: octaves of its age that were counted before.
            evictions: since its last use.
            is_reused: whether it was used again.

        Returns:
            octaves of its age that are counted now.
        """
        age, by_uses = _age_of(evictions), cls // (DEPTHS * KINDS)
        for reached, reused in (
            (self._watched[cls], self._reused[cls]),
            (self._pooled_watched[by_uses], self._pooled_reused[by_uses]),
        ):
            for each in range(watched, age + 1):
                reached[each] += 1.0
            reused[age] += is_reused
        self._num_events += 1
        if self._num_events % self._epoch == 0:
            self._forget()
        else:
            self._num_new[cls] += 1
            if self._num_new[cls] >= _NEW:
                self._rebuild(cls)
        return max(watched, age + 1)

    def index(self, cls: int, evictions: int) -> float:
        """Return expected uses per eviction from now on, of a block unused for so many evictions."""
        return self._index[cls][_age_of(evictions)]

    def _rebuild(self, cls: int) -> None:
        self._num_new[cls] = 0
        self._index[cls] = self._computed(cls)

    def _computed(self, cls: int) -> list[float]:
        by_uses = cls // (DEPTHS * KINDS)
        reused, watched = self._reused[cls], self._watched[cls]
        pooled_reused, pooled_watched = self._pooled_reused[by_uses], self._pooled_watched[by_uses]
        rates = []
        for age in range(AGES):
            pooled = (pooled_reused[age] + _UNKNOWN) / (pooled_watched[age] + 1.0)
            rates.append(min(1.0, (reused[age] + _PRIOR * pooled) / (watched[age] + _PRIOR)))
        return [_index(rates, age) for age in range(AGES)]

    def _forget(self) -> None:
        for rows in (self._pooled_reused, self._pooled_watched, self._reused, self._watched):
            for row in rows:
                row[:] = [count * _KEPT for count in row]
        for cls in range(_CLASSES):
            self._rebuild(cls)


def _zeros(rows: int) -> list[list[float]]:
    return [[0.0] * AGES for _ in range(rows)]


def _age_of(evictions: int) -> int:
    return min(AGES - 1, evictions.bit_length())


def _index(rates: list[float], age: int) -> float:
    best = reused = stayed = 0.0
    left = 1.0
    for end in range(age, AGES):
        reused += left * rates[end]
        stayed += left * _WIDTHS[end] * (1.0 - rates[end] * 0.5)
        left *= 1.0 - rates[end]
        best = max(best, reused / stayed)
    return best
