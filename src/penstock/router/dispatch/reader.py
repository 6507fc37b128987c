"""The reading end of a request: takes deltas as they come, and wakes the one task that does everything that waits.

Deltas go to their sink in the turn of the event loop that brings them, without a task. Those of one turn go as one: a frontend that
is behind its workers finds several steps in one read, and handles them together.
"""

import asyncio
import math
from types import TracebackType
from typing import Protocol, Self

from penstock.core.types.requests import Delta
from penstock.seams import DeltaSink, Hold


class _Readable(Protocol):
    def pass_on(self) -> None: ...


class ReadableRequests:
    """Requests with deltas for their sinks, which get them at the end of this turn of the loop. One event loop owns it."""

    def __init__(self) -> None:
        self._requests: dict[_Readable, None] = {}

    def add(self, request: _Readable) -> None:
        """Have a request pass on what it has; once a turn is enough."""
        if not self._requests:
            asyncio.get_running_loop().call_soon(self._pass_on)
        self._requests[request] = None

    def _pass_on(self) -> None:
        requests, self._requests = self._requests, {}
        for request in requests:
            request.pass_on()


class DeltaReader:
    """Passes deltas to a sink, or has the task fetch them. One event loop owns it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sink: DeltaSink | None = None
        self._hold: Hold | None = None
        self._failure: Exception | None = None
        self.has_stopped = False
        """Whether the sink wants no more."""
        self._waiter: asyncio.Future[None] | None = None

    def taking(self, sink: DeltaSink) -> Self:
        """Pass deltas to `sink` until the block ends."""
        self._sink = sink
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sink = None

    @property
    def takes(self) -> bool:
        """Whether a delta may be passed on now."""
        return (
            self._sink is not None and self._hold is None and self._failure is None and not self.has_stopped
        )

    def pass_on(self, delta: Delta) -> None:
        """Pass a delta to the sink; what it raises, the task gets."""
        assert self._sink is not None, "it takes"
        try:
            self._hold = self._sink(delta)
        except Exception as error:  # noqa: BLE001 - it ends the reader's request, not the worker's connection
            self._failure = error
        if self._hold is not None or self._failure is not None:
            self.wake()

    def interrupt(self, why: Hold | Exception) -> None:
        """Wait for something before the sink takes again, or end with an error of the sink's."""
        if isinstance(why, Exception):
            self._failure = why
        else:
            self._hold = why
        self.wake()

    async def settle(self) -> bool:
        """Wait until the sink takes again; False if it takes already. Raises what it raised."""
        if self._failure is not None:
            raise self._failure
        hold = self._hold
        if hold is None:
            return False
        await hold()
        self._hold = None
        return True

    def stop(self) -> None:
        """Take no more."""
        self.has_stopped = True
        self.wake()

    def wake(self) -> None:
        """Wake the task."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until `wake`."""
        self._waiter = self._loop.create_future()
        await self._waiter

    async def wait_until(self, time_s: float) -> None:
        """Wait until this loop time, or until `wake`."""
        self._waiter = self._loop.create_future()
        timeout_s = None if time_s == math.inf else time_s - self._loop.time()
        await asyncio.wait((self._waiter,), timeout=timeout_s)
