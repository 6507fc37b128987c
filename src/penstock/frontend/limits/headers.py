"""Request options that clients send as headers."""

from collections.abc import Mapping

import msgspec

from penstock.core.errors import RequestError
from penstock.core.types.requests import TraceContext
from penstock.frontend.config import FrontendConfig
from penstock.frontend.errors import ForbiddenError
from penstock.frontend.limits.trace_context import read_trace
from penstock.frontend.tenants.tenants import PRIORITY_MAX, Tenant

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
            f"{EXPLAIN_HEADER}: this server does not tell (frontend.explains); leave the header out",
            param=EXPLAIN_HEADER,
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
        raise RequestError(f"{EXPLAIN_HEADER}: must be 1 or 0, got {value[:40]!r}", param=EXPLAIN_HEADER)
    return value == "1"


def target_s(name: str, target_ms: float, bounds_ms: tuple[float, float]) -> float:
    """Convert a latency target to seconds.

    Raises:
        RequestError: out of bounds; `name` is the field or header.
    """
    low, high = bounds_ms
    if not low <= target_ms <= high:
        raise RequestError(
            f"{name}: must be {low:g} to {high:,.0f} milliseconds, got {target_ms:g}", param=name
        )
    return target_ms / 1e3


def _target_in(headers: Mapping[str, str], header: str, bounds_ms: tuple[float, float]) -> float | None:
    text = headers.get(header)
    if text is None:
        return None
    try:
        target_ms = float(text)
    except ValueError as error:
        raise RequestError(
            f"{header}: must be a number of milliseconds, got {text[:40]!r}", param=header
        ) from error
    return target_s(header, target_ms, bounds_ms)


def _name_in(headers: Mapping[str, str], header: str) -> str:
    name = headers.get(header, "")
    if len(name) > _NAME_CHARACTERS_MAX:
        raise RequestError(
            f"{header}: must have at most {_NAME_CHARACTERS_MAX} characters, got {len(name)}", param=header
        )
    if not name.isprintable():  # bytes that are no UTF-8 come as lone surrogates
        raise RequestError(f"{header}: must be printable text in UTF-8, got {name[:40]!a}", param=header)
    return name


def _priority_in(headers: Mapping[str, str], header: str) -> int | None:
    name = headers.get(header)
    if name is None:
        return None
    priority = _PRIORITIES.get(name.strip().lower())
    if priority is None:
        raise RequestError(
            f"{header}: must be one of {', '.join(_PRIORITIES)}, got {name[:40]!r}", param=header
        )
    return priority
