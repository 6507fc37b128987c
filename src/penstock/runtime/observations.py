"""A worker's window of steps and load."""

import asyncio
import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Self

import msgspec

from penstock.core.cuda import visible_gpus
from penstock.core.log import get_logger
from penstock.core.types.instances import Role
from penstock.core.types.load import WorkerLoad
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
        utilization: share of the time in which they computed, 0 to 1, their mean.
    """

    watts: float
    utilization: float

    @staticmethod
    def mean(uses: "Sequence[GpuUse]") -> "GpuUse | None":
        """Give the mean over several times; None of none."""
        if not uses:
            return None
        return GpuUse(
            watts=sum(use.watts for use in uses) / len(uses),
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


_PERIOD_S = 1.0
_log = get_logger()


class GpuMeter:
    """Reads a process' GPUs each second, in a thread. One event loop owns it.

    Without the package `nvidia-ml-py`, a driver, or the right to ask it reads nothing. NVML counts GPUs as the PCI bus has them.
    """

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        """Read nothing yet; `open` makes one.

        Args:
            nvml: the module `pynvml`, initialised.
            handles: NVML's handles of the GPUs.
        """
        self.latest: GpuUse | None = None
        """What was read last; None if nothing can be."""
        self._nvml = nvml
        self._handles = tuple(handles)

    @classmethod
    def open(cls, names: Sequence[str]) -> Self | None:
        """Find GPUs by index or UUID; None where NVML does not know them, or is not here."""
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
            handles = [
                nvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdigit()
                else nvml.nvmlDeviceGetHandleByUUID(name)
                for name in names
            ]
        except nvml.NVMLError as error:
            _log.info("gpu_power_unknown", gpus=list(names), error=str(error))
            return None
        return cls(nvml, handles)

    def read(self) -> GpuUse | None:
        """Read all GPUs; None if one cannot be read. Takes some milliseconds."""
        nvml = self._nvml
        watts = busy = 0.0
        try:
            for handle in self._handles:
                watts += nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
                busy += nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        except nvml.NVMLError:
            return None
        return GpuUse(watts=watts, utilization=busy / len(self._handles))

    async def run(self) -> None:
        """Read each second until it is cancelled."""
        while True:
            self.latest = await asyncio.to_thread(self.read)
            await asyncio.sleep(_PERIOD_S)


def gpu_names(first: int, count: int, environ: Mapping[str, str]) -> list[str]:
    """Name a worker's GPUs for NVML: those that CUDA_VISIBLE_DEVICES lists at these places, else their indices."""
    names = visible_gpus(environ)
    every = range(first, first + count)
    return [str(index) for index in every] if names is None else names[every.start : every.stop]


class RequestRecorder:
    """Counts a frontend's requests. One event loop owns it, and is its clock."""

    def __init__(self) -> None:
        """Begin a window now."""
        self._since_s = asyncio.get_running_loop().time()
        self._arrivals = self._finished = self._failed = self._cached_tokens = 0
        self._input_tokens, self._output_tokens = DigestRecorder(), DigestRecorder()
        self._ttft_s, self._itl_s = DigestRecorder(), DigestRecorder()
        self._decode_ttft_s = DigestRecorder()

    def arrived(self, input_tokens: int) -> None:
        """Count a request that was parsed and tokenized."""
        self._arrivals += 1
        self._input_tokens.add(input_tokens)

    def first_token(self, ttft_s: float, *, waited_for_decode: bool) -> None:
        """Count a first token; `waited_for_decode` as `RequestStream` says it."""
        self._ttft_s.add(ttft_s)
        if waited_for_decode:
            self._decode_ttft_s.add(ttft_s)

    def ended(self, *, output_tokens: int, cached_tokens: int, itl_s: float | None, failed: bool) -> None:
        """Count a request's end; `itl_s` is the mean time between its tokens, None where there was at most one."""
        if itl_s is not None:
            self._itl_s.add(itl_s)
        if failed:
            self._failed += 1
            return
        self._finished += 1
        self._output_tokens.add(output_tokens)
        self._cached_tokens += cached_tokens

    def take(self, *, queued: int, oldest_queued_s: float) -> RequestWindow:
        """Return the window until now, and begin the next one.

        Args:
            queued: requests that wait in the router.
            oldest_queued_s: how long the oldest of them has waited.
        """
        now_s = asyncio.get_running_loop().time()
        window = RequestWindow(
            seconds=now_s - self._since_s,
            arrivals=self._arrivals,
            finished=self._finished,
            failed=self._failed,
            input_tokens=self._input_tokens.take(),
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens.take(),
            ttft_s=self._ttft_s.take(),
            itl_s=self._itl_s.take(),
            queued=queued,
            oldest_queued_s=oldest_queued_s,
            decode_ttft_s=self._decode_ttft_s.take(),
        )
        self._since_s = now_s
        self._arrivals = self._finished = self._failed = self._cached_tokens = 0
        return window


class WorkerRecorder:
    """Counts a worker's steps. One event loop owns it, and is its clock."""

    def __init__(self) -> None:
        """Make a recorder; `begin` starts it."""
        self._role = Role.AGGREGATED
        self._ready_s = self._since_s = 0.0
        self._step_s = DigestRecorder()
        self._last_step_s: float | None = None
        self._steps = 0
        """Steps of the engine so far."""
        self._before = WorkerLoad()

    def begin(self, role: Role) -> None:
        """Begin a window: the worker is ready in this role, its first one or another."""
        self._role = role
        self._ready_s = self._since_s = asyncio.get_running_loop().time()
        self._step_s.take()
        self._last_step_s = None

    def stepped(self, load: WorkerLoad) -> None:
        """Count what the engine has finished; `load` is its load after that.

        An engine may report several steps at once: `load.steps` tells how many, and each counts with their mean time.
        """
        now_s = asyncio.get_running_loop().time()
        before, self._steps = self._steps, max((rank.steps for rank in load.ranks), default=load.steps)
        if self._last_step_s is not None:
            steps = max(1, self._steps - before)
            self._step_s.add((now_s - self._last_step_s) / steps, steps)
        self._last_step_s = now_s if self._is_busy(load) else None

    def _is_busy(self, load: WorkerLoad) -> bool:
        """Tell whether the next step follows at once. Requests that wait at a decode worker wait for their KV, not for a step."""
        waiting = 0 if self._role is Role.DECODE else load.waiting_requests
        return load.running_requests + waiting > 0

    def take(self, load: WorkerLoad, *, oldest_wait_s: float = 0.0) -> WorkerWindow:
        """Return the window until now, and begin the next one.

        Args:
            load: the engine's load now.
            oldest_wait_s: longest time that a request has waited for its first token so far.
        """
        now_s = asyncio.get_running_loop().time()
        before, self._before = self._before, load
        window = WorkerWindow(
            seconds=now_s - self._since_s,
            role=self._role,
            ready_s=now_s - self._ready_s,
            step_s=self._step_s.take(),
            prefilled_tokens=max(0, load.prefilled_tokens - before.prefilled_tokens),
            generated_tokens=max(0, load.generated_tokens - before.generated_tokens),
            preemptions=max(0, load.preemptions - before.preemptions),
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            queued_prefill_tokens=load.queued_prefill_tokens,
            context_tokens=load.context_tokens,
            active_blocks=load.active_blocks,
            total_blocks=load.total_blocks,
            oldest_wait_s=oldest_wait_s,
        )
        self._since_s = now_s
        return window
