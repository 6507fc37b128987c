"""What became of each request, and the windows in which a planner sees it."""

import math
from array import array
from dataclasses import dataclass, field

from penstock.runtime.observations import Digest, RequestWindow, bucket_of


@dataclass(slots=True)
class Tally:
    """TTFT and mean ITL of each request by its number; NaN before they are known."""

    requests: int
    ttft_s: "array[float]" = field(init=False)
    itl_s: "array[float]" = field(init=False)
    finished: int = 0
    cached_tokens: int = 0
    _arrivals: int = 0
    _ended: int = 0
    _cached_tokens: int = 0
    _sums: dict[str, "_Sum"] = field(init=False)
    _buckets: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ttft_s = array("d", [math.nan]) * self.requests
        self.itl_s = array("d", [math.nan]) * self.requests
        self._begin_window()

    def arrive(self, tokens: int) -> None:
        self._arrivals += 1
        self._sums["input"].add(tokens, self._length_bucket(tokens))

    def first_token(self, number: int, arrived_s: float, at_s: float) -> None:
        ttft_s = at_s - arrived_s
        self.ttft_s[number] = ttft_s
        self._sums["ttft"].add(ttft_s, bucket_of(ttft_s))

    def finish(self, number: int, output: int, cached: int, first_s: float, at_s: float) -> None:
        self.finished += 1
        self._ended += 1
        self.cached_tokens += cached
        self._cached_tokens += cached
        self._sums["output"].add(output, self._length_bucket(output))
        if output > 1:
            itl_s = (at_s - first_s) / (output - 1)
            self.itl_s[number] = itl_s
            self._sums["itl"].add(itl_s, bucket_of(itl_s))
        else:
            self.itl_s[number] = 0.0

    def window(self, seconds: float) -> RequestWindow:
        """Give what happened since the last window."""
        sums = self._sums
        found = RequestWindow(
            seconds=seconds,
            arrivals=self._arrivals,
            finished=self._ended,
            input_tokens=sums["input"].digest(),
            cached_tokens=self._cached_tokens,
            output_tokens=sums["output"].digest(),
            ttft_s=sums["ttft"].digest(),
            itl_s=sums["itl"].digest(),
        )
        self._begin_window()
        return found

    def _begin_window(self) -> None:
        self._arrivals = self._ended = self._cached_tokens = 0
        self._sums = {name: _Sum() for name in ("input", "output", "ttft", "itl")}

    def _length_bucket(self, tokens: int) -> int:
        found = self._buckets.get(tokens)
        if found is None:
            found = self._buckets[tokens] = bucket_of(tokens)
        return found


@dataclass(slots=True)
class _Sum:
    count: int = 0
    total: float = 0.0
    buckets: dict[int, int] = field(default_factory=dict)

    def add(self, value: float, bucket: int) -> None:
        self.count += 1
        self.total += value
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def digest(self) -> Digest:
        return Digest(count=self.count, total=self.total, buckets=self.buckets)
