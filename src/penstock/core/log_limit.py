"""A limit on repeated warnings, so that a peer or client that fails in a loop cannot fill the log."""

import time
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

PER_MINUTE = 60
"""Warnings of one event name that a process prints in a minute; the rest are counted."""
_MINUTE_S = 60.0


class WarningLimit:
    """A structlog processor. It drops warnings over the limit, and adds their number as `suppressed` to the next one printed."""

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
        if window[1] >= PER_MINUTE:
            window[2] += 1
            raise structlog.DropEvent
        window[1] += 1
        if window[2]:
            event_dict["suppressed"] = int(window[2])
            window[2] = 0
        return event_dict
