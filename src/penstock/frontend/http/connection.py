"""One client connection: limits on bytes and time before a request exists, and answers to invalid HTTP."""

import asyncio
import logging
import math
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from typing import Any

from aiohttp import web

from penstock.core.errors import Overloaded, PenstockError
from penstock.core.framing import unsent_bytes
from penstock.frontend.config import ReceiveConfig
from penstock.frontend.errors import ReceiveTimeoutError
from penstock.frontend.limits.admission import ReceiveBudget, ReceivedBytes

Refuse = Callable[[BaseException | None, int], web.Response]
Raw = Callable[[PenstockError], bytes]
_AFTER_STREAMS_S = 1.0


class ClientConnection(web.RequestHandler):
    """Answers invalid HTTP and late headers with the API's error JSON.

    Bytes of headers, and of pipelined requests behind the current one, count in the receive budget here. Bytes of
    bodies are counted by `BodyReader`.
    """

    __slots__ = (
        "_early",
        "_headers_timer",
        "_last_body",
        "_raw",
        "_reader_timeout_s",
        "_reader_timer",
        "_refuse",
        "_settings",
        "_timeout_s"
    )  # fmt: skip

    def __init__(
        self,
        server: web.Server,
        *,
        refuse: Refuse,
        raw: Raw,
        budget: ReceiveBudget,
        receive: ReceiveConfig,
        loop: AbstractEventLoop,
        logger: logging.Logger,
        keepalive_timeout_s: float,
        reader_timeout_s: float = math.inf,
    ) -> None:
        """Create the handler of one connection.

        Args:
            server: aiohttp's server, which calls the request handler.
            refuse: makes the response to what aiohttp rejected.
            raw: makes the bytes of an error response where no request exists yet.
            budget: receive budget of all connections.
            receive: gives the longest time for headers.
            loop: the event loop.
            logger: receives aiohttp's log lines.
            keepalive_timeout_s: seconds the connection may be idle.
            reader_timeout_s: seconds in which the client may take nothing of an answer; then the connection is closed.
        """
        no_access_log: Any = None  # allowed by aiohttp, missing from its annotation
        super().__init__(
            server,
            loop=loop,
            logger=logger,
            access_log=no_access_log,
            keepalive_timeout=keepalive_timeout_s,
            auto_decompress=False,  # BodyReader inflates, within bounds
        )
        self._refuse = refuse
        self._raw = raw
        self._timeout_s = receive.timeout_s
        self._settings = budget.settings
        self._early = ReceivedBytes(budget, self._drop)
        self._headers_timer: TimerHandle | None = None
        self._last_body: Any = None  # aiohttp's reader of the latest request's body
        self._reader_timeout_s = reader_timeout_s
        self._reader_timer: TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        requests = self._request_count
        is_body = self._last_body is not None and not self._last_body.is_eof() and not self._messages
        super().data_received(data)
        if self._request_count != requests:
            self._stop_timer()
            if self._messages:
                self._last_body = self._messages[-1][1]
            if self._current_request is None:
                return  # handled at once
        elif is_body:
            return  # body bytes, counted by BodyReader
        elif self._current_request is None and self._headers_timer is None and data:
            self._headers_timer = self._loop.call_later(self._timeout_s, self._headers_late)
        if data and self.transport is not None:
            try:
                self._early.take(len(data))
            except Overloaded as error:
                self._drop(error)

    def request_began(self) -> None:
        """Forget the bytes counted here: the request that begins counts its own."""
        if not self._messages:
            self._early.release()

    def pause_writing(self) -> None:
        """Begin to watch a client that leaves more unread than the write buffer holds."""
        super().pause_writing()
        if self._reader_timeout_s < math.inf and self.transport is not None:
            self._watch_reader(self.transport, unsent_bytes(self.transport))

    def resume_writing(self) -> None:
        self._leave_reader()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        self._leave_reader()
        self._early.release()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs, and aborts an answer already begun
        return self._refuse(exc, status)

    def _watch_reader(self, transport: asyncio.Transport, unsent: int) -> None:
        # A stream notices by itself, a little earlier, and ends with an error of its own. A connection that is being closed is
        # watched too: it would wait for ever until its client has read.
        self._reader_timer = self._loop.call_later(
            self._reader_timeout_s + _AFTER_STREAMS_S, self._check_reader, transport, unsent
        )

    def _check_reader(self, transport: asyncio.Transport, before: int) -> None:
        unsent = unsent_bytes(transport)
        if unsent < before:
            self._watch_reader(transport, unsent)
        else:
            transport.abort()

    def _leave_reader(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _headers_late(self) -> None:
        self._headers_timer = None
        self._end(
            ReceiveTimeoutError(
                f"the headers had not come whole {self._timeout_s:g} s after their first byte; send them faster, or raise "
                f"{self._settings}receive.timeout_s"
            )
        )

    def _drop(self, why: PenstockError) -> None:
        if self._current_request is None:
            self._end(why)
        elif self.transport is not None:  # pipelined behind another answer: no error can be sent
            self.transport.abort()

    def _end(self, why: PenstockError) -> None:
        if self.transport is not None:
            self.transport.write(self._raw(why))
        self.force_close()

    def _stop_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None
