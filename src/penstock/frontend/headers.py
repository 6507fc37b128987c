"""What a client says of a request outside of its body."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.errors import RequestError
from penstock.frontend.config import FrontendConfig
from penstock.frontend.errors import ForbiddenError

EXPLAIN_HEADER = "X-Penstock-Explain"
_NAME_CHARACTERS_MAX = 256
_PRIORITIES = {"high": 1, "normal": 0, "low": -1}


@dataclass(frozen=True, slots=True)
class Wishes:
    """The client's name for the session that the request is of, and whether the answer is to say why it went where it did.

    `tenant` and `priority` as in `Request`.
    """

    session: str | None = None
    tenant: str = ""
    priority: int = 0
    explains: bool = False


NO_WISHES = Wishes()


def read_wishes(headers: Mapping[str, str], config: FrontendConfig) -> Wishes:
    """Read the headers.

    Raises:
        RequestError: one has a value that it must not have, or asks for what is not told here (403).
    """
    explains = asks_why(headers)
    if explains and not config.explains:
        raise ForbiddenError(
            f"{EXPLAIN_HEADER}: this server does not tell (frontend.explains); leave the header out",
            param=EXPLAIN_HEADER,
        )
    return Wishes(
        session=_name_in(headers, config.session_header) or None,
        tenant=_name_in(headers, config.tenant_header),
        priority=_priority_in(headers, config.priority_header),
        explains=explains,
    )


def asks_why(headers: Mapping[str, str]) -> bool:
    """Tell whether the answer is to say why the request went where it did.

    Raises:
        RequestError: the header says neither.
    """
    value = headers.get(EXPLAIN_HEADER, "0").strip()
    if value not in {"0", "1"}:
        raise RequestError(f"{EXPLAIN_HEADER}: must be 1 or 0, got {value[:40]!r}", param=EXPLAIN_HEADER)
    return value == "1"


def _name_in(headers: Mapping[str, str], header: str) -> str:
    name = headers.get(header, "")
    if len(name) > _NAME_CHARACTERS_MAX:
        raise RequestError(
            f"{header}: must have at most {_NAME_CHARACTERS_MAX} characters, got {len(name)}", param=header
        )
    return name


def _priority_in(headers: Mapping[str, str], header: str) -> int:
    name = headers.get(header, "normal")
    priority = _PRIORITIES.get(name.strip().lower())
    if priority is None:
        raise RequestError(
            f"{header}: must be one of {', '.join(_PRIORITIES)}, got {name[:40]!r}", param=header
        )
    return priority
