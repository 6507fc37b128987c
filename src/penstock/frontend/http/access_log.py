"""The access log: one line for each request, as JSON or text.

A line is written at once and whole, so that several processes may share a file. A file that was moved away, as logrotate does,
is opened anew within a second.
"""

import asyncio
import datetime as dt
import os
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
from aiohttp import web

from penstock.core.clock import wall_time_s
from penstock.core.errors import ConfigError
from penstock.core.log import cause, get_logger
from penstock.frontend.frontend import PendingAnswer, PendingEmbeddings
from penstock.frontend.limits.headers import RequestOptions

STDERR = "-"
_LOOK_S = 1.0
_log = get_logger()


@dataclass(slots=True)
class Line:
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
        """Give the fields in the order of the line, those that say nothing left out."""
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

    def write(self, line: Line, status: int) -> None:
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


line_of_request: ContextVar[Line | None] = ContextVar("line_of_request", default=None)
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
