"""W3C trace context: the trace that a client's request belongs to, passed on as it came."""

import re
from collections.abc import Mapping

from penstock.core.types.requests import TraceContext

_STATE_CHARACTERS_MAX = 512
_ID_CHARACTERS_MAX = 128
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_ZERO_TRACE, _ZERO_SPAN = "0" * 32, "0" * 16


def sound_request_id(headers: Mapping[str, str]) -> str:
    """Give the client's `X-Request-Id`; empty where there is none that may be repeated in a header and a log."""
    given = headers.get("X-Request-Id", "")
    is_sound = 0 < len(given) <= _ID_CHARACTERS_MAX and given.isascii() and given.isprintable()
    return given if is_sound else ""


def read_trace(headers: Mapping[str, str]) -> TraceContext | None:
    """Give the trace of a request, None without any. What is malformed is left out, as W3C's recommendation says."""
    request_id, parent = sound_request_id(headers), headers.get("traceparent", "").strip()
    if not request_id and not parent:
        return None
    if not _is_valid(parent):
        return TraceContext(request_id=request_id) if request_id else None
    state = headers.get("tracestate", "")
    is_sound = len(state) <= _STATE_CHARACTERS_MAX and state.isascii() and state.isprintable()
    return TraceContext(request_id=request_id, traceparent=parent, tracestate=state if is_sound else "")


def _is_valid(parent: str) -> bool:
    found = _TRACEPARENT.fullmatch(parent)
    if found is None or (found[1] == "00" and found[5]) or len(parent) > _STATE_CHARACTERS_MAX:
        return False
    return found[2] != _ZERO_TRACE and found[3] != _ZERO_SPAN and parent.isprintable()
