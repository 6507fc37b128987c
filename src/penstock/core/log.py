"""Structured logs: an event is `noun_verbed`, everything else is key=value with units.

Levels: info for lifecycle, debug per request, warning for what was recovered from, error where an operator must act.
"""

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from typing import Any, TextIO

import structlog

from penstock.core.errors import ConfigError

WARNINGS_PER_MINUTE = 60
"""Warnings of one event name that a process prints in a minute."""
_MINUTE_S = 60.0
_CAUSE_MAX = 1000


def configure(level: str = "info", *, process: str, stream: TextIO | None = None) -> None:
    """Send this process's log to `stream`, one line per event; as JSON with PENSTOCK_LOG_FORMAT=json.

    Args:
        level: debug, info, warning or error.
        process: the name on each line, such as `worker-1`.
        stream: destination; None is stderr.

    Raises:
        ConfigError: PENSTOCK_LOG_FORMAT is neither json nor text.
    """
    form = os.environ.get("PENSTOCK_LOG_FORMAT") or "text"
    if form not in {"json", "text"}:
        raise ConfigError(f"PENSTOCK_LOG_FORMAT: must be json or text, got {form!r}")
    out: Any = stream or _Stderr()
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=out.isatty(), pad_event_to=0, pad_level=False)
    )
    structlog.configure(
        processors=[
            WarningLimit(),
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(out),
    )
    structlog.contextvars.bind_contextvars(process=process)
    asyncio_log = logging.getLogger("asyncio")
    asyncio_log.handlers = [_AsyncioRecords()]
    asyncio_log.propagate = False


class _AsyncioRecords(logging.Handler):
    """Gives what asyncio and uvloop log the form of the other lines."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if (
            "eof_received() has no effect when using ssl" in text
        ):  # each TLS connection of a stream reader has it
            return
        error = record.exc_info[1] if record.exc_info else None
        line = get_logger().error if record.levelno >= logging.ERROR else get_logger().warning
        line("asyncio_reported", message=text.split("\n", 1)[0], **(cause(error) if error else {}))


class WarningLimit:
    """A structlog processor that drops warnings over a limit, so that a peer that fails in a loop cannot fill the log.

    The next warning of the name that is printed has the number of those dropped as `suppressed`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:  # noqa: TID251 - logs have no loop
        self._clock = clock
        self._windows: dict[str, list[float]] = {}  # event -> start in seconds, printed, suppressed

    def __call__(
        self, _logger: object, method: str, event_dict: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Pass an event on.

        Raises:
            structlog.DropEvent: the event is a warning over the limit.
        """
        if method != "warning":
            return event_dict
        now_s = self._clock()
        window = self._windows.setdefault(str(event_dict["event"]), [now_s, 0, 0])
        if now_s - window[0] >= _MINUTE_S:
            window[:2] = now_s, 0
        if window[1] >= WARNINGS_PER_MINUTE:
            window[2] += 1
            raise structlog.DropEvent
        window[1] += 1
        if window[2]:
            event_dict["suppressed"] = int(window[2])
            window[2] = 0
        return event_dict


class _Stderr:
    """Looks up `sys.stderr` for each line, since it may be replaced and the old one closed."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()


def cause(error: BaseException) -> dict[str, Any]:
    """Give an error's fields for a line of the log: what happened and where; the traceback only at debug level."""
    fields: dict[str, Any] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:_CAUSE_MAX]}
    if frames := traceback.extract_tb(error.__traceback__):
        fields["at"] = f"{frames[-1].filename}:{frames[-1].lineno}"
    if is_debugging():
        fields["exc_info"] = error
    return fields


def get_logger(**bound: Any) -> Any:
    """Make a logger; before `configure` it prints with structlog's defaults."""
    return structlog.get_logger(**bound)


def is_debugging() -> bool:
    """Say whether debug lines are shown, so that callers can skip building expensive ones."""
    return structlog.is_configured() and bool(get_logger().is_enabled_for(logging.DEBUG))
