"""What a planner decides by: demand and workers over some seconds, added up from the windows of a deployment's processes."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.core.types.instances import Role
from penstock.runtime.observations import Digest, GpuUse, RequestWindow, Window, WorkerWindow

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class ObservedDemand:
    """Requests of all frontends. Rates are per second of observed time."""

    arrivals_per_s: float = 0.0
    finished_per_s: float = 0.0
    failed_per_s: float = 0.0
    input_tokens: Digest = field(default_factory=Digest)
    output_tokens: Digest = field(default_factory=Digest)
    cached_share: float = 0.0
    """Share of input tokens that came from a prefix cache."""
    ttft_s: Digest = field(default_factory=Digest)
    itl_s: Digest = field(default_factory=Digest)
    queued: int = 0
    """Requests that wait in routers now."""
    oldest_queued_s: float = 0.0
    decode_ttft_s: Digest = field(default_factory=Digest)
    """Of `ttft_s`, those of requests that waited for decode workers."""


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """One worker. Rates are means of the observed time, the rest is of its last window."""

    name: str
    role: Role
    ready_s: float
    step_s: Digest
    prefilled_tokens_per_s: float
    generated_tokens_per_s: float
    running_requests: int
    waiting_requests: int
    queued_prefill_tokens: int
    context_tokens: int
    kv_usage: float
    """Share of KV blocks that live requests hold, 0 to 1."""
    oldest_wait_s: float
    gpu: GpuUse | None = None
    """Its GPUs over the observed time; None without, or where NVML does not tell."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A deployment as seen at `at_s`, over the `seconds` before: fewer than asked for where it began later.

    `frontends` and `workers` are those that have sent a window lately; `silent` names the others that were seen before.
    """

    at_s: float
    seconds: float
    demand: ObservedDemand
    frontends: tuple[str, ...] = ()
    workers: tuple[ObservedWorker, ...] = ()
    silent: tuple[str, ...] = ()

    def of(self, role: Role) -> tuple[ObservedWorker, ...]:
        """Give the workers of a role."""
        return tuple(worker for worker in self.workers if worker.role is role)


_SOURCES_MAX = 4096


class ObservationStream:
    """Windows by source, each with the loop time of its arrival. One event loop owns it.

    Each source has at most `windows_max` windows, and there are at most 4,096 sources, and as many that are yet to be heard; older
    ones are dropped.
    """

    def __init__(self, *, kept_s: float = 300.0, silent_after_s: float = 5.0, windows_max: int = 600) -> None:
        """Make an empty stream.

        Args:
            kept_s: windows older than this are dropped.
            silent_after_s: a source without a window for so long does not count any more.
            windows_max: most windows of a source.
        """
        self.on_window: Callable[[], None] = lambda: None
        """Called after each window."""
        self._kept_s = kept_s
        self._silent_after_s = silent_after_s
        self._windows_max = windows_max
        self._sources: dict[str, deque[tuple[float, Window]]] = {}
        self._expected: dict[str, float] = {}
        """Since when sources without a window that is kept are expected to send one."""

    def expect(self, source: str) -> None:
        """Note that a process is ready, so that it counts as silent if no window comes."""
        if source not in self._sources:
            self._expect(source, asyncio.get_running_loop().time())

    def put(self, source: str, window: Window) -> None:
        """Take a window; `source` is the name of its process."""
        now_s = asyncio.get_running_loop().time()
        self._expected.pop(source, None)
        windows = self._sources.pop(source, None) or deque(maxlen=self._windows_max)
        windows.append((now_s, window))
        self._sources[source] = windows  # the one heard last is last
        while len(self._sources) > _SOURCES_MAX or self._is_past(now_s):
            oldest = next(iter(self._sources))
            last_s, _ = self._sources.pop(oldest)[-1]
            self._expect(oldest, last_s)
        self.on_window()

    def forget(self, source: str) -> None:
        """Drop a process that has ended; its requests stay in no sum, and it is not silent."""
        self._sources.pop(source, None)
        self._expected.pop(source, None)

    def observe(self, seconds: float) -> Observation:
        """Add up what arrived in the last `seconds`."""
        now_s = asyncio.get_running_loop().time()
        since_s = now_s - seconds
        begun_s = now_s
        requests: dict[str, list[RequestWindow]] = {}
        workers: list[ObservedWorker] = []
        silent = [name for name, at_s in self._expected.items() if now_s - at_s > self._silent_after_s]
        for source, windows in self._sources.items():
            last_s, last = windows[-1]
            recent = [window for at_s, window in windows if at_s > since_s]
            if now_s - last_s > self._silent_after_s:
                silent.append(source)
            elif isinstance(last, WorkerWindow):
                own = [window for window in recent if isinstance(window, WorkerWindow)]
                workers.append(_view(source, last, own or [last]))
            requests_of = [window for window in recent if isinstance(window, RequestWindow)]
            if requests_of:
                requests[source] = requests_of
                begun_s = min(begun_s, *(at_s - w.seconds for at_s, w in windows if at_s > since_s))
        covered_s = min(seconds, now_s - begun_s) or seconds
        # After a pause of this process, windows of a longer time have arrived at once.
        spans_s = (sum(window.seconds for window in windows) for windows in requests.values())
        covered_s = max(covered_s, *spans_s) if requests else covered_s
        return Observation(
            at_s=now_s,
            seconds=covered_s,
            demand=demand_of(requests, set(silent), covered_s),
            frontends=tuple(sorted(requests.keys() - set(silent))),
            workers=tuple(sorted(workers, key=lambda worker: worker.name)),
            silent=tuple(sorted(silent)),
        )

    def _expect(self, source: str, since_s: float) -> None:
        self._expected[source] = since_s
        while len(self._expected) > _SOURCES_MAX:
            del self._expected[next(iter(self._expected))]

    def _is_past(self, now_s: float) -> bool:
        last_s, _ = next(iter(self._sources.values()))[-1]
        return now_s - last_s > self._kept_s


def demand_of(requests: dict[str, list[RequestWindow]], silent: set[str], seconds: float) -> ObservedDemand:
    """Add up the frontends' windows, which cover `seconds`."""
    every = [window for windows in requests.values() for window in windows]
    last = [windows[-1] for name, windows in requests.items() if name not in silent]
    inputs = Digest.merged(window.input_tokens for window in every)
    cached = sum(window.cached_tokens for window in every)
    return ObservedDemand(
        arrivals_per_s=sum(window.arrivals for window in every) / seconds,
        finished_per_s=sum(window.finished for window in every) / seconds,
        failed_per_s=sum(window.failed for window in every) / seconds,
        input_tokens=inputs,
        output_tokens=Digest.merged(window.output_tokens for window in every),
        cached_share=min(1.0, cached / inputs.total) if inputs.total else 0.0,
        ttft_s=Digest.merged(window.ttft_s for window in every),
        itl_s=Digest.merged(window.itl_s for window in every),
        queued=sum(window.queued for window in last),
        oldest_queued_s=max((window.oldest_queued_s for window in last), default=0.0),
        decode_ttft_s=Digest.merged(window.decode_ttft_s for window in every),
    )


def _view(name: str, last: WorkerWindow, windows: list[WorkerWindow]) -> ObservedWorker:
    """Add up a worker's windows in its present role."""
    own = [window for window in windows if window.role is last.role]
    seconds = sum(window.seconds for window in own) or 1.0
    return ObservedWorker(
        name=name,
        role=last.role,
        ready_s=last.ready_s,
        step_s=Digest.merged(window.step_s for window in own),
        prefilled_tokens_per_s=sum(window.prefilled_tokens for window in own) / seconds,
        generated_tokens_per_s=sum(window.generated_tokens for window in own) / seconds,
        running_requests=last.running_requests,
        waiting_requests=last.waiting_requests,
        queued_prefill_tokens=last.queued_prefill_tokens,
        context_tokens=last.context_tokens,
        kv_usage=last.active_blocks / last.total_blocks if last.total_blocks else 0.0,
        oldest_wait_s=last.oldest_wait_s,
        gpu=GpuUse.mean([window.gpu for window in own if window.gpu is not None]),
    )
