"""Requests that must be prepared before they can be queued, such as by compiling a grammar: on a thread, for seconds at most."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from penstock.core import log
from penstock.core.errors import EngineError, Overloaded, PenstockError, RequestError
from penstock.core.ids import RequestId
from penstock.core.types.requests import Request

TIMEOUT_S = 10.0
"""Half a second is the longest that a grammar within llguidance's limits takes, and its tokenizer takes another; the rest is waiting."""
_log = log.get_logger()


class Preparer(Protocol):
    """What has to be made for some requests."""

    def is_ready(self, request: Request) -> bool:
        """Say whether a request needs no preparation. Called on the event loop; returns at once."""
        ...

    def prepare(self, request: Request) -> None:
        """Prepare a request. Called on a thread.

        Raises:
            PenstockError: the request cannot be computed.
        """
        ...


@dataclass(slots=True)
class _Preparing:
    request: Request
    future: asyncio.Future[None]
    timer: asyncio.TimerHandle


class Preparations:
    """Prepares requests one after another, on a thread of its own. One event loop owns it."""

    def __init__(
        self, preparer: Preparer, on_done: Callable[[Request, PenstockError | None], None], waiting_max: int
    ) -> None:
        """Make it.

        Args:
            preparer: does the work.
            on_done: called with each request that is prepared, or with why it cannot be.
            waiting_max: requests under way.
        """
        self._preparer = preparer
        self._on_done = on_done
        self._waiting_max = waiting_max
        self._under_way: dict[RequestId, _Preparing] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-prepare")

    def __len__(self) -> int:
        return len(self._under_way)

    def is_ready(self, request: Request) -> bool:
        return self._preparer.is_ready(request)

    def begin(self, request: Request) -> None:
        """Prepare a request.

        Raises:
            RequestError: its id is under way already.
            Overloaded: too many are.
        """
        if request.request_id in self._under_way:
            raise RequestError(f"request_id: {request.request_id!r} is under way already; choose another")
        if len(self._under_way) >= self._waiting_max:
            raise Overloaded(
                f"{self._waiting_max} requests wait for their grammar already; try again later",
                retry_after_s=1.0,
            )
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, self._preparer.prepare, request)
        preparing = _Preparing(request, future, loop.call_later(TIMEOUT_S, self._expire, request.request_id))
        self._under_way[request.request_id] = preparing
        future.add_done_callback(lambda _: self._end(preparing))

    def abort(self, request_id: RequestId) -> bool:
        """Drop a request; False if it is not here."""
        preparing = self._under_way.pop(request_id, None)
        if preparing is None:
            return False
        preparing.timer.cancel()
        preparing.future.cancel()
        return True

    def close(self) -> None:
        """Drop all requests. Safe twice."""
        for request_id in tuple(self._under_way):
            self.abort(request_id)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _expire(self, request_id: RequestId) -> None:
        request = self._under_way[request_id].request
        self.abort(request_id)
        self._on_done(
            request,
            RequestError(
                f"response_format: was not compiled within {TIMEOUT_S:g} s; simplify it, or try again later",
                param="response_format",
            ),
        )

    def _end(self, preparing: _Preparing) -> None:
        request = preparing.request
        if self._under_way.get(request.request_id) is not preparing:
            if not preparing.future.cancelled():
                preparing.future.exception()  # nobody waits for it any more
            return
        del self._under_way[request.request_id]
        preparing.timer.cancel()
        error = preparing.future.exception()
        if error is not None and not isinstance(error, PenstockError):
            _log.error("request_not_prepared", request_id=request.request_id, **log.cause(error))
            error = EngineError(f"request {request.request_id}: could not be prepared: {error!r}")
        self._on_done(request, error)
