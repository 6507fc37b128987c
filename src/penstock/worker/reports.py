"""When a worker tells its load.

What it tells changes slowly while a batch only decodes, and at once when a request comes, gets its first token or
ends. So changes in what runs are told soon, and the rest now and then: a frontend of a thousand workers hears a
thousand reports a second from a busy fleet, and not one for each step of each.
"""

import asyncio
import math
from collections.abc import Callable
from functools import cached_property

from penstock.core.types.load import WorkerLoad
from penstock.worker.config import WorkerConfig


class LoadReports:
    """Decides when the load is sent. One event loop owns it.

    A worker that becomes busy or idle says so at once; any other change in what runs is told `load_interval_s` after
    the last report, or at once if that is long ago; a busy worker where nothing changes reports every `load_refresh_s`.
    Idle ones are silent. What other frontends could not know otherwise is told with the loop's next turn (`hurry`).
    """

    def __init__(
        self, config: WorkerConfig, read: Callable[[], WorkerLoad], send: Callable[[WorkerLoad], None]
    ) -> None:
        """Send nothing yet.

        Args:
            config: the times.
            read: gives the load as it is now.
            send: takes it to every frontend.
        """
        self.accepted = 0
        """Requests that came so far, refused ones included; the worker counts them."""
        self._interval_s, self._refresh_s = config.load_interval_s, config.load_refresh_s
        self._read = read
        self._send = send
        self._sent_s = float("-inf")
        self._told = (0, 0, 0, 0)
        self._was_busy = False
        self._due_s = math.inf  # when to report at the latest
        self._timer: asyncio.Handle | None = None
        self._rings_s = (
            math.inf
        )  # when the timer rings; uvloop gives a plain Handle for a moment that has come
        self._hurried: asyncio.Handle | None = None

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The loop that owns it, asked for once: asking takes a system call, half a microsecond."""
        return asyncio.get_running_loop()

    def note(self, load: WorkerLoad | None = None) -> None:
        """See whether there is something to tell, after a step or a request that came or went.

        Args:
            load: as the step left it; None to read it.
        """
        load = load or self._read()
        if _is_busy(load) is not self._was_busy:
            self._report(load)
        elif self._what_runs(load) != self._told:
            due_s = self._sent_s + self._interval_s
            if self._loop.time() >= due_s:
                self._report(load)
            else:
                self._arm(due_s)

    def hurry(self) -> None:
        """Report once what comes in this turn of the loop is taken."""
        if self._hurried is None:
            self._hurried = self._loop.call_soon(self._report)

    def close(self) -> None:
        """Send nothing more."""
        if self._hurried is not None:
            self._hurried.cancel()
            self._hurried = None
        self._disarm()

    def _report(self, load: WorkerLoad | None = None) -> None:
        """Send the load; it is read unless that was done this moment."""
        load = load or self._read()
        self._sent_s = self._loop.time()
        self._told = self._what_runs(load)
        self._was_busy = _is_busy(load)
        self._due_s = math.inf
        if self._hurried is not None:
            self._hurried.cancel()
            self._hurried = None
        if self._was_busy:
            self._arm(self._sent_s + self._refresh_s)
        self._send(load)

    def _arm(self, due_s: float) -> None:
        """Report by then. A timer that is set for earlier stays: it finds out when it rings, and is set anew."""
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

    def _what_runs(self, load: WorkerLoad) -> tuple[int, int, int, int]:
        return self.accepted, load.running_requests, load.waiting_requests, load.queued_prefill_tokens


def _is_busy(load: WorkerLoad) -> bool:
    """Say whether a request is there, or an aborted one's blocks wait for the step under way to end."""
    return bool(load.running_requests or load.waiting_requests or load.active_blocks)
