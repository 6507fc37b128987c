"""What is told of each request: a line of the access log, and the spans of its trace."""

import asyncio
import datetime as dt
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import msgspec
from aiohttp import web

from penstock.core.clock import wall_time_s
from penstock.core.errors import ConfigError
from penstock.core.log import cause, get_logger
from penstock.frontend.frontend import PendingAnswer, PendingEmbeddings
from penstock.frontend.limits.headers import RequestOptions
from penstock.router.dispatch.state import Journey
from penstock.router.explanations import RoutingExplanation
from penstock.runtime import spans
from penstock.seams import RequestDispatcher

STDERR = "-"
_LOOK_S = 1.0
_log = get_logger()


@dataclass(slots=True)
class AccessLine:
    """What is known of a request by its end; `pending` is of generation only."""

    request_id: str
    client: str
    method: str
    path: str
    began_s: float  # event loop time
    tenant: str = ""
    trace_id: str = ""
    pending: PendingAnswer | PendingEmbeddings | None = None

    @classmethod
    def of(cls, request: web.Request, request_id: str) -> Self:
        """Begin the line of a request. Its query is left out: it may hold secrets."""
        path = request.raw_path.partition("?")[0]
        return cls(request_id, request.remote or "", request.method, path, _now_s())

    @classmethod
    def nameless(cls, request_id: str) -> Self:
        """Make the line of bytes that are no request."""
        return cls(request_id, "", "-", "-", _now_s())

    def generates(self, pending: PendingAnswer | PendingEmbeddings, options: RequestOptions) -> None:
        """Note what the request generates."""
        self.pending = pending
        self.trace_id = "" if options.trace is None else options.trace.trace_id

    def fields(self, status: int, now_s: float) -> dict[str, Any]:
        """Give the fields in the order of the line, empty ones left out."""
        fields: dict[str, Any] = {
            "time": dt.datetime.fromtimestamp(wall_time_s(), dt.UTC).isoformat(timespec="milliseconds"),
            "status": status,
            "method": self.method,
            "path": self.path,
            "duration_s": round(now_s - self.began_s, 4),
        }
        told = {
            "client": self.client,
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "tenant": self.tenant,
        }
        fields |= {name: value for name, value in told.items() if value}
        if (pending := self.pending) is not None:
            usage, ttft_s = pending.completion.usage(), pending.completion.ttft_s
            fields |= {
                "model": pending.prepared.model.card.name,
                "answer_id": pending.prepared.id,
                "stream": pending.stream,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "output_tokens": usage.completion_tokens,
            }
            if ttft_s is not None:
                fields["ttft_s"] = round(ttft_s, 4)
        return fields


class AccessLog:
    """Writes lines to a file or stderr. One event loop owns it."""

    def __init__(self, file: str, *, as_json: bool) -> None:
        """Open the file.

        Raises:
            ConfigError: it cannot be written.
        """
        self._path = None if file == STDERR else Path(file).expanduser()
        self._as_json = as_json
        self._descriptor = 2
        self._looked_s = 0.0
        self._has_failed = False
        if self._path is not None:
            try:
                self._descriptor = _open(self._path)
            except OSError as error:
                raise ConfigError(
                    f"frontend.access_log: {file}: {error.strerror or error}; give a file that can be written, or - for stderr"
                ) from error

    @classmethod
    def of(cls, file: str | None) -> Self | None:
        """Open the log that the settings name; None for none. Raises ConfigError where it cannot be written."""
        return None if file is None else cls(file, as_json=os.environ.get("PENSTOCK_LOG_FORMAT") == "json")

    def write(self, line: AccessLine, status: int) -> None:
        """Write a request's line. Where that fails the log says so once, and the request is not touched."""
        now_s = _now_s()
        fields = line.fields(status, now_s)
        text = msgspec.json.encode(fields) if self._as_json else _text(fields)
        try:
            self._follow(now_s)
            os.write(self._descriptor, text + b"\n")
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                _log.error("access_log_not_written", **cause(error))

    def close(self) -> None:
        """Close the file. Safe twice."""
        if self._path is not None and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _follow(self, now_s: float) -> None:
        """Open the file anew where another one, or none, is at its path."""
        if self._path is None or now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        mine = os.fstat(self._descriptor)
        try:
            is_same = os.path.samestat(mine, self._path.stat())
        except FileNotFoundError:
            is_same = False
        if not is_same:
            descriptor = _open(self._path)
            os.close(self._descriptor)
            self._descriptor = descriptor


line_of_request: ContextVar[AccessLine | None] = ContextVar("line_of_request", default=None)
"""Of the request being handled, while there is an access log."""


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)


def _text(fields: dict[str, Any]) -> bytes:
    """Write `time status method path key=value ...`; what a client wrote is quoted where it has spaces, quotes or others than ASCII."""
    head = " ".join(_word(fields.pop(name)) for name in ("time", "status", "method", "path"))
    rest = " ".join(f"{name}={_word(value)}" for name, value in fields.items())
    return f"{head} {rest}".encode()


def _word(value: Any) -> str:
    if not isinstance(value, str):
        return str(value).lower() if isinstance(value, bool) else str(value)
    is_plain = value.isascii() and value.isprintable() and not set(value) & set(' "=')
    return value if is_plain else msgspec.json.encode(value).decode()


@dataclass(slots=True)
class TracedRequest:
    """A request whose trace is sampled; `pending` once it was prepared."""

    span: spans.Span
    dispatcher: RequestDispatcher
    pending: PendingAnswer | None = None

    @classmethod
    def begin(cls, path: str, options: RequestOptions, dispatcher: RequestDispatcher) -> Self | None:
        """Begin its span; None where it is not traced."""
        if not spans.is_recording():
            return None
        parent = None if options.trace is None or not options.trace.traceparent else options.trace
        span = spans.begin(f"POST {path}", parent, asyncio.get_running_loop().time(), is_server=True)
        return None if span is None else cls(span, dispatcher)

    def carried(self, options: RequestOptions) -> RequestOptions:
        """Give the options with the span as what workers work for; the client's `X-Request-Id` goes along."""
        trace, given = self.span.trace, options.trace
        if given is not None:
            trace = type(trace)(
                request_id=given.request_id, traceparent=trace.traceparent, tracestate=given.tracestate
            )
        return msgspec.structs.replace(options, trace=trace)

    def end(self, route: str, status: int) -> None:
        """Record the spans within it, and end it."""
        now_s = asyncio.get_running_loop().time()
        attributes: dict[str, str | int | float | bool] = {
            "http.route": route,
            "http.response.status_code": status,
        }
        if self.pending is not None:
            usage, prepared = self.pending.completion.usage(), self.pending.prepared
            attributes |= {
                "gen_ai.request.model": prepared.model.card.name,
                "gen_ai.response.id": prepared.id,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "penstock.cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "penstock.stream": self.pending.stream,
            }
            if prepared.options.tenant:
                attributes["penstock.tenant"] = prepared.options.tenant
            if (ttft_s := self.pending.completion.ttft_s) is not None:
                attributes["penstock.ttft_s"] = ttft_s
            decisions = {each.request_id: each for each in self._decisions(prepared.id)}
            for journey in self.dispatcher.journeys(prepared.id):
                if isinstance(journey, Journey):
                    self._record(journey, decisions.get(journey.request_id), now_s)
        failed = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        self.span.end(now_s, attributes, error=HTTPStatus(status).phrase if failed else "")

    def _decisions(self, answer_id: str) -> Iterator[RoutingExplanation]:
        return (each for each in self.dispatcher.explain(answer_id) if isinstance(each, RoutingExplanation))

    def _record(self, journey: Journey, decision: RoutingExplanation | None, now_s: float) -> None:
        """Record the router's part of a choice, and each worker's."""
        opened_s, trace = now_s - journey.age_s, self.span.trace
        routed: dict[str, str | int | float | bool] = {"penstock.request_id": journey.request_id}
        if decision is not None:
            chosen = decision.chosen
            routed |= {
                "penstock.policy": decision.policy,
                "penstock.reason": decision.reason.value,
                "penstock.worker": decision.worker,
                "penstock.candidates": decision.num_candidates,
                "penstock.overlap_blocks": chosen.overlap_blocks,
                **{f"penstock.cost.{name}": value for name, value in chosen.terms.items()},
            }
            if decision.prefill is not None and decision.prefill.worker is not None:
                routed["penstock.prefill_worker"] = decision.prefill.worker
        spans.record("router", trace, opened_s, opened_s + journey.queued_s, routed)
        for leg in journey.legs:
            ended_s = journey.seconds if leg.ended_s is None else leg.ended_s
            spans.record(
                f"send to {leg.worker}",
                trace,
                opened_s + leg.sent_s,
                opened_s + ended_s,
                {"penstock.worker": leg.worker, "penstock.part": leg.part.value},
            )


traced_request: ContextVar[TracedRequest | None] = ContextVar("traced_request", default=None)
"""Of the request being handled."""
