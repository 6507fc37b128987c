"""What a process has seen in a short window of time, in a few hundred bytes: for planners, real and simulated.

Frontends say what was asked and how it went; workers say how they work. A window has counts, sums and digests, no requests.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from penstock.core.types.instances import Role
from penstock.core.wire import Wire

_PER_DOUBLING = 8
_BUCKET_MIN = -160  # 1e-6
_BUCKET_MAX = 240  # 1e9


def bucket_of(value: float) -> int:
    """Give the bucket of a value: eight for each doubling, so a bucket's ends differ by 9 %; values below 1e-6 share one."""
    if value <= 0:
        return _BUCKET_MIN
    return min(max(math.floor(math.log2(value) * _PER_DOUBLING), _BUCKET_MIN), _BUCKET_MAX)


def _middle(bucket: int) -> float:
    return 0.0 if bucket == _BUCKET_MIN else 2.0 ** ((bucket + 0.5) / _PER_DOUBLING)


class Digest(Wire, frozen=True):
    """A distribution: how many values, their sum, and how many in each bucket of `bucket_of`."""

    count: int = 0
    total: float = 0.0
    buckets: dict[int, int] = msgspec.field(default_factory=dict)

    @property
    def mean(self) -> float | None:
        """The exact mean; None of no values."""
        return self.total / self.count if self.count else None

    @property
    def spread(self) -> float:
        """Mean square over squared mean, within a few percent: 1 of equal values, 2 of exponential ones; 1 of no values."""
        if not self.total:
            return 1.0
        squares = sum(number * _middle(bucket) ** 2 for bucket, number in self.buckets.items())
        return max(1.0, squares * self.count / self.total**2)

    def values(self) -> list[tuple[float, int]]:
        """Give (value, how many) of each bucket, each by its middle."""
        return [(_middle(bucket), number) for bucket, number in self.buckets.items()]

    def above(self, value: float) -> int:
        """Count the values above `value`; one bucket's are above or not by its middle."""
        return sum(number for bucket, number in self.buckets.items() if _middle(bucket) > value)

    def quantile(self, share: float) -> float | None:
        """Give the value that `share` (0 to 1) of the values do not exceed, within 5 %; None of no values."""
        if not self.count:
            return None
        ordered = sorted(self.buckets)
        sums = accumulate(self.buckets[bucket] for bucket in ordered)
        reached = (bucket for bucket, seen in zip(ordered, sums, strict=True) if seen >= share * self.count)
        bucket = next(reached, ordered[-1])
        return _middle(bucket)

    def minus(self, part: "Digest") -> "Digest":
        """Give the values that are not in `part`, whose values are all in this one."""
        left = {bucket: number - part.buckets.get(bucket, 0) for bucket, number in self.buckets.items()}
        return Digest(
            count=self.count - part.count,
            total=self.total - part.total,
            buckets={bucket: number for bucket, number in left.items() if number},
        )

    @staticmethod
    def merged(digests: Iterable["Digest"]) -> "Digest":
        """Add up digests."""
        count, total, buckets = 0, 0.0, dict[int, int]()
        for digest in digests:
            count += digest.count
            total += digest.total
            for bucket, number in digest.buckets.items():
                buckets[bucket] = buckets.get(bucket, 0) + number
        return Digest(count=count, total=total, buckets=buckets)


class RequestWindow(Wire, frozen=True, tag="requests"):
    """The requests of one frontend.

    Attributes:
        seconds: length of the window.
        arrivals: requests that were parsed and tokenized; `input_tokens` are theirs, cached ones included.
        finished: requests that ended without an error, and clients that left; `cached_tokens` and `output_tokens` are theirs.
        failed: requests that ended with an error, refusals of a full queue included.
        ttft_s: from arrival to the first token, of requests whose first token came in the window.
        itl_s: mean time between tokens of a stream, of each request that ended in the window.
        queued: requests that wait in the router at the end of the window; the oldest since `oldest_queued_s`.
        decode_ttft_s: of `ttft_s`, those of requests that waited for decode workers: one computed the prompt, or none had a
            batch slot for most of the time.
    """

    seconds: float
    arrivals: int = 0
    finished: int = 0
    failed: int = 0
    input_tokens: Digest = Digest()
    cached_tokens: int = 0
    output_tokens: Digest = Digest()
    ttft_s: Digest = Digest()
    itl_s: Digest = Digest()
    queued: int = 0
    oldest_queued_s: float = 0.0
    decode_ttft_s: Digest = Digest()


class GpuUse(Wire, frozen=True):
    """The GPUs of one worker, together.

    Attributes:
        watts: what they draw, without the host.
        limit_watts: the most that they may draw.
        utilization: share of the time in which they computed, 0 to 1, their mean.
    """

    watts: float
    limit_watts: float
    utilization: float

    @staticmethod
    def mean(uses: "Sequence[GpuUse]") -> "GpuUse | None":
        """Give the mean over several times; None of none."""
        if not uses:
            return None
        return GpuUse(
            watts=sum(use.watts for use in uses) / len(uses),
            limit_watts=uses[-1].limit_watts,
            utilization=sum(use.utilization for use in uses) / len(uses),
        )


class WorkerWindow(Wire, frozen=True, tag="worker"):
    """The work of one worker.

    Attributes:
        seconds: length of the window.
        ready_s: seconds since the worker was ready, or had its role; young ones are colder and slower than they will be.
        step_s: time between two finished steps, while the engine had requests throughout.
        prefilled_tokens: prompt tokens computed in the window, like `generated_tokens` and `preemptions`.
        running_requests: at the end of the window, like what follows.
        queued_prefill_tokens: prompt tokens not computed yet.
        oldest_wait_s: longest time that a request has waited for its first token so far.
        gpu: its GPUs; None without, or where NVML does not tell.
    """

    seconds: float
    role: Role
    ready_s: float = 0.0
    step_s: Digest = Digest()
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    queued_prefill_tokens: int = 0
    context_tokens: int = 0
    active_blocks: int = 0
    total_blocks: int = 0
    oldest_wait_s: float = 0.0
    gpu: GpuUse | None = None


Window = RequestWindow | WorkerWindow
