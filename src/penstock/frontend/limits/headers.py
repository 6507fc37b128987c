"""What the headers of a request say: options, trace context, and by which name the server was asked.

A page of another site may send requests to `localhost` without asking first. By DNS rebinding it may also read the answers: its own name
then stands for 127.0.0.1. A browser sends both names, in `Origin` and in `Host`.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from penstock.core.errors import RequestError
from penstock.core.listening import Address
from penstock.core.types.requests import TraceContext
from penstock.frontend.config import FrontendConfig
from penstock.frontend.errors import ForbiddenError
from penstock.frontend.limits.tenants import PRIORITY_MAX, Tenant

_STATE_CHARACTERS_MAX = 512
_ID_CHARACTERS_MAX = 128
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_ZERO_TRACE, _ZERO_SPAN = "0" * 32, "0" * 16


def sound_request_id(headers: Mapping[str, str]) -> str:
    """Give the client's `X-Request-Id`; empty without one, or where it may not be repeated in a header and a log."""
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


EXPLAIN_HEADER = "X-Penstock-Explain"
FORWARDED_HEADER = "X-Penstock-Forwarded"
"""1 in a request of another deployment's router. Anybody may send it: the request then stays here."""
TTFT_HEADER = "X-Penstock-SLO-TTFT-Ms"
ITL_HEADER = "X-Penstock-SLO-ITL-Ms"
TTFT_MS = (1.0, 3_600_000.0)
"""(min, max) ms of a TTFT target: 1 ms to 1 hour."""
ITL_MS = (0.1, 60_000.0)
"""(min, max) ms of an ITL target: 0.1 ms to 1 minute."""
_NAME_CHARACTERS_MAX = 256
_PRIORITIES = {"high": 1, "normal": 0, "low": -1}


class RequestOptions(msgspec.Struct, frozen=True):
    """Options of one request from its headers.

    `session` is the client's session id. `explains`: the answer includes the routing decision. `tenant` and SLO targets as in
    `Request`. `priority` is the header's, None without; `usual_priority` and `priority_max` are the tenant's. `cache_salt` is
    the tenant's, too: empty for that of everybody. `is_forwarded` as in `Request`.
    """

    session: str | None = None
    tenant: str = ""
    priority: int | None = None
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    explains: bool = False
    usual_priority: int = 0
    priority_max: int = PRIORITY_MAX
    cache_salt: str = ""
    trace: TraceContext | None = None
    is_forwarded: bool = False

    def priority_of(self, asked: int | None) -> int:
        """Give the request's priority: the header's, else what its body has `asked` for, else the tenant's; at most the tenant's highest."""
        wanted = self.priority if self.priority is not None else asked
        return min(self.usual_priority if wanted is None else wanted, self.priority_max)


NO_OPTIONS = RequestOptions()


def read_options(headers: Mapping[str, str], config: FrontendConfig, tenant: Tenant) -> RequestOptions:
    """Read the headers of a tenant's request.

    Raises:
        RequestError: a header has an invalid value, or asks for an explanation where these are off (403).
    """
    explains = wants_explanation(headers)
    if explains and not config.explains:
        raise ForbiddenError(
            "this server does not tell (frontend.explains); leave the header out",
            field=EXPLAIN_HEADER,
        )
    return RequestOptions(
        session=_name_in(headers, config.session_header) or None,
        tenant=tenant.name,
        priority=_priority_in(headers, config.priority_header),
        slo_ttft_s=_target_in(headers, TTFT_HEADER, TTFT_MS),
        slo_itl_s=_target_in(headers, ITL_HEADER, ITL_MS),
        explains=explains,
        usual_priority=tenant.priority,
        priority_max=tenant.priority_max,
        cache_salt=tenant.cache_salt,
        trace=read_trace(headers),
        is_forwarded=tenant.is_link or headers.get(FORWARDED_HEADER, "").strip() == "1",
    )


def named_tenant(headers: Mapping[str, str], config: FrontendConfig) -> str:
    """Give the tenant that a trusted client names; empty for none.

    Raises:
        RequestError: the name is too long.
    """
    return _name_in(headers, config.tenant_header)


def wants_explanation(headers: Mapping[str, str]) -> bool:
    """Tell whether the client asks for the routing decision.

    Raises:
        RequestError: the header is neither 1 nor 0.
    """
    value = headers.get(EXPLAIN_HEADER, "0").strip()
    if value not in {"0", "1"}:
        raise RequestError(f"must be 1 or 0, got {value[:40]!r}", field=EXPLAIN_HEADER)
    return value == "1"


def target_s(name: str, target_ms: float, bounds_ms: tuple[float, float]) -> float:
    """Convert a latency target to seconds.

    Raises:
        RequestError: out of bounds; `name` is the field or header.
    """
    low, high = bounds_ms
    if not low <= target_ms <= high:
        raise RequestError(f"must be {low:g} to {high:,.0f} milliseconds, got {target_ms:g}", field=name)
    return target_ms / 1e3


def _target_in(headers: Mapping[str, str], header: str, bounds_ms: tuple[float, float]) -> float | None:
    text = headers.get(header)
    if text is None:
        return None
    try:
        target_ms = float(text)
    except ValueError as error:
        raise RequestError(f"must be a number of milliseconds, got {text[:40]!r}", field=header) from error
    return target_s(header, target_ms, bounds_ms)


def _name_in(headers: Mapping[str, str], header: str) -> str:
    name = headers.get(header, "")
    if len(name) > _NAME_CHARACTERS_MAX:
        raise RequestError(
            f"must have at most {_NAME_CHARACTERS_MAX} characters, got {len(name)}", field=header
        )
    if not name.isprintable():  # bytes that are no UTF-8 come as lone surrogates
        raise RequestError(f"must be printable text in UTF-8, got {name[:40]!a}", field=header)
    return name


def _priority_in(headers: Mapping[str, str], header: str) -> int | None:
    name = headers.get(header)
    if name is None:
        return None
    priority = _PRIORITIES.get(name.strip().lower())
    if priority is None:
        raise RequestError(f"must be one of {', '.join(_PRIORITIES)}, got {name[:40]!r}", field=header)
    return priority


_SHOWN_CHARACTERS_MAX = 100
_ANY = "*"


class OwnNames:
    """Checks `Host` and `Origin` of requests to a server that listens on loopback, or that was given names. Immutable."""

    def __init__(
        self, host: str, hosts: Sequence[str], *, setting: str, origins: Sequence[str] = (), pages: str = ""
    ) -> None:
        """Make the check of one listener.

        Args:
            host: where it listens.
            hosts: names by which it may be asked, beside `localhost` and IP addresses; `*` is any.
            setting: has these names, for errors.
            origins: of pages that may use the API.
            pages: the setting that has them, for errors; empty: the same.
        """
        self._is_on = Address(host=host).is_local or bool(hosts)
        self._host = host
        self._hosts = frozenset(name.lower() for name in hosts)
        self._setting = setting
        self._pages = pages or setting
        self._origins = frozenset(origins)
        self._may_ask_as = lru_cache(maxsize=256)(lambda host: self._is_own(name_of(host)))

    def check(self, request: web.BaseRequest, *, for_pages: bool = True) -> None:
        """Check a request; `for_pages`: pages of `origins` may send it.

        Raises:
            ForbiddenError: a page of another site sends it, or may read the answer.
        """
        if not self._is_on:
            return
        for host in request.headers.getall("Host", ()):
            if host and not self._may_ask_as(host):
                raise ForbiddenError(
                    f"Host: this server listens on {self._host} and has no name {name_of(host)[:_SHOWN_CHARACTERS_MAX]!r}, as a page"
                    f" of another site would call it (DNS rebinding); ask for localhost or an IP address, or add the name to {self._setting}"
                )
        origin = request.headers.get("Origin")
        if origin is None or request.method == "OPTIONS" or self._is_own_page(origin, request.host):
            return  # a page that asks by OPTIONS whether it may is not told so
        if not (for_pages and (_ANY in self._origins or origin in self._origins)):
            raise ForbiddenError(
                f"Origin: a page of {origin[:_SHOWN_CHARACTERS_MAX]!r} may not use this server, which listens on {self._host}; name"
                f" pages that may use the API in {self._pages}"
            )

    def _is_own(self, name: str) -> bool:
        is_named = name in self._hosts or _ANY in self._hosts
        return is_named or is_unnamed(name) or name.endswith(".localhost")

    def _is_own_page(self, origin: str, host: str) -> bool:
        """Tell whether the page is this server's, another one's of this host, or no web page: sites cannot claim other schemes."""
        scheme, mark, place = origin.partition("://")
        if not mark:  # "null": a file, or a frame that any site may make
            return False
        name = name_of(place)
        return (
            scheme not in {"http", "https"}
            or place == host
            or name == "localhost"
            or name.endswith(".localhost")
            or name in self._hosts
            or _is_loopback(name)
        )


def is_unnamed(name: str) -> bool:
    """Tell whether a host is `localhost` or an IP address: no name that somebody could have resolve to this machine."""
    try:
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def name_of(host: str) -> str:
    """Give the name of `NAME`, `NAME:PORT` or `[ADDRESS]:PORT`, in lower case; a text of another form is returned whole."""
    try:
        return (urlsplit(f"//{host}").hostname or host).rstrip(".")
    except ValueError:
        return host
