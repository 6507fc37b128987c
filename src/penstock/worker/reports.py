"""When a worker sends load reports.

The load changes slowly while a batch only decodes, and jumps when a request arrives, gets its first token or ends. So jumps
are reported soon and the rest once a second: a frontend of a thousand busy workers receives a thousand reports a second, not
one per engine step.
"""

import asyncio
import math
from collections.abc import Callable
from functools import cached_property

from penstock.core.types.load import KvTierCounts, LinkReport, WorkerLoad
from penstock.worker.config import WorkerConfig

_Kept = tuple[tuple[KvTierCounts, ...], int, LinkReport | None]
"""What changes without a request: blocks in tiers, pinned blocks, and another region behind a link."""


class LoadReports:
    """Decides when load reports are sent. One event loop owns it.

    A worker that becomes busy or idle reports at once. Any other change of the running requests is reported
    `load_interval_s` after the last report, or at once if that has passed. A busy worker without changes reports every
    `load_refresh_s`, an idle one only if KV still moves between its tiers, a pin ended, or a link's region changed. With several frontends, a new request is reported in the loop's next turn
    (`hurry`), since the other frontends cannot know of it.
    """

    def __init__(
        self, config: WorkerConfig, read: Callable[[], WorkerLoad], send: Callable[[WorkerLoad], None]
    ) -> None:
        """Make an idle reporter.

        Args:
            config: the intervals.
            read: returns the current load.
            send: sends a load to every frontend.
        """
        self.accepted = 0
        """Requests and prefetches received so far, refused ones included; the worker counts them."""
        self._interval_s, self._refresh_s = config.load_interval_s, config.load_refresh_s
        self._read = read
        self._send = send
        self._sent_s = float("-inf")
        self._sent: tuple[int, ...] = (0, 0, 0, 0)  # what ran as of the last report
        self._sent_kept: _Kept = ((), 0, None)
        self._was_busy = False
        self._due_s = math.inf  # latest time of the next report
        self._timer: asyncio.Handle | None = None
        self._rings_s = math.inf  # when the timer fires; uvloop's Handle does not tell
        self._hurried: asyncio.Handle | None = None

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The event loop, looked up once: the lookup takes a system call, half a microsecond."""
        return asyncio.get_running_loop()

    def note(self, load: WorkerLoad | None = None) -> None:
        """Report now or later if the load has changed; called after a step, and when a request arrives or ends.

        Args:
            load: the load after the step; None: read it.
        """
        load = load or self._read()
        if _is_busy(load) is not self._was_busy:
            self._report(load)
        elif self._what_runs(load) != self._sent:
            due_s = self._sent_s + self._interval_s
            if self._loop.time() >= due_s:
                self._report(load)
            else:
                self._arm(due_s)
        elif (load.kv_tiers, load.pinned_blocks, load.link) != self._sent_kept:
            self.refresh()

    def hurry(self) -> None:
        """Report in the next turn of the loop, once for all requests of this turn."""
        if self._hurried is None:
            self._hurried = self._loop.call_soon(self._report)

    def refresh(self) -> None:
        """Report within `load_refresh_s`, though nothing runs that changed."""
        self._arm(max(self._loop.time(), self._sent_s + self._refresh_s))

    def close(self) -> None:
        """Send nothing more."""
        if self._hurried is not None:
            self._hurried.cancel()
            self._hurried = None
        self._disarm()

    def _report(self, load: WorkerLoad | None = None) -> None:
        """Send a load; None: read it."""
        load = load or self._read()
        self._sent_s = self._loop.time()
        self._sent = self._what_runs(load)
        self._sent_kept = load.kv_tiers, load.pinned_blocks, load.link
        self._was_busy = _is_busy(load)
        self._due_s = math.inf
        if self._hurried is not None:
            self._hurried.cancel()
            self._hurried = None
        if self._was_busy:
            self._arm(self._sent_s + self._refresh_s)
        self._send(load)

    def _arm(self, due_s: float) -> None:
        """Report by `due_s`. A timer set for an earlier time stays; it is set again when it fires too early."""
        if due_s < self._due_s:
            self._due_s = due_s
        if self._timer is None or self._rings_s > self._due_s:
            self._disarm()
            self._rings_s = self._due_s
            self._timer = self._loop.call_at(self._due_s, self._ring)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        if self._loop.time() >= self._due_s:
            self._report()
        elif self._due_s < math.inf:
            self._arm(self._due_s)

    def _what_runs(self, load: WorkerLoad) -> tuple[int, ...]:
        """Give what runs, of each data-parallel rank where there are several."""
        if load.ranks:
            return self.accepted, *(figure for rank in load.ranks for figure in _figures(rank))
        return self.accepted, *_figures(load)


def _is_busy(load: WorkerLoad) -> bool:
    """Say whether there is a request, or blocks of an aborted one that the current step still uses."""
    return bool(load.running_requests or load.waiting_requests or load.active_blocks > load.pinned_blocks)


def _figures(load: WorkerLoad) -> tuple[int, int, int]:
    return load.running_requests, load.waiting_requests, load.queued_prefill_tokens
