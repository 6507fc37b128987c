"""Collects values of one window."""

from penstock.runtime.observations.windows import Digest, bucket_of


class DigestRecorder:
    """A digest that grows. Its buckets are bounded by `bucket_of`."""

    __slots__ = ("_buckets", "_count", "_total")

    def __init__(self) -> None:
        self._count = 0
        self._total = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, value: float, count: int = 1) -> None:
        """Add a value `count` times."""
        self._count += count
        self._total += value * count
        bucket = bucket_of(value)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    def take(self) -> Digest:
        """Return what was added, and begin anew."""
        digest = Digest(count=self._count, total=self._total, buckets=self._buckets)
        self._count, self._total, self._buckets = 0, 0.0, {}
        return digest
