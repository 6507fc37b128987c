"""What agents say of a request: its session, its KV, and hints. NVIDIA Dynamo's names for the same, in `nvext`, are taken too."""

import math
from typing import Any, Protocol

import msgspec

from penstock.core.errors import RequestError
from penstock.core.json_text import encode_json
from penstock.core.types.requests import (
    KV_PRIORITY_MAX,
    KV_PRIORITY_MIN,
    KvRetention,
    SessionAction,
    SessionControl,
)
from penstock.frontend.openai.lenient import name_once

SESSION_CHARACTERS_MAX = 256
PRIORITY_MAX = 1000
_OUTPUT_TOKENS_MAX = (1 << 31) - 1
_ACTIONS = tuple(action.value for action in SessionAction)


class SessionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`session` of a body. Without an action the request belongs to a session that another request opened, if one did."""

    id: str
    action: str | None = None
    ttl_s: float | None = None
    ephemeral: bool = False


class AgentHintsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`agent_hints` of a body. None: not given."""

    priority: int | None = None
    osl: int | None = None
    speculative_prefill: bool | None = None


class RetentionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`kv_retention` of a body: how long the request's KV is kept, against other KV that nobody uses."""

    priority: int | None = None
    ttl_s: float | None = None


class PeerSessionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`nvext.session_control`: a session whose KV is freed when it is closed, or `timeout` seconds after its last request."""

    session_id: str
    action: str | None = None
    timeout: float | None = None


class PeerBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`nvext` of a body, as far as it is served."""

    session_control: PeerSessionBody | None = None
    agent_hints: AgentHintsBody | None = None
    annotations: list[str] | None = None
    # The body's own fields of the same names.
    ignore_eos: bool | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    greed_sampling: bool | None = None  # temperature 0
    # Accepted, no effect on the answer.
    agent_context: Any = None
    extra_fields: Any = None


class AgentRequest(Protocol):
    """The fields of a body that are read here."""

    session: SessionBody | None
    kv_retention: RetentionBody | None
    agent_hints: AgentHintsBody | None
    nvext: PeerBody | None


class PeerFields(Protocol):
    """A body whose `nvext` may have fields in the place of its own."""

    nvext: PeerBody | None


class AgentOptions(msgspec.Struct, frozen=True):
    """What a body says of its session, and its hints; None where it says nothing."""

    session: str | None = None
    control: SessionControl | None = None
    priority: int | None = None
    output_tokens: int | None = None
    speculative_prefill: bool = False
    retention: KvRetention | None = None


_NO_OPTIONS = AgentOptions()
_SHARED = (
    "ignore_eos",
    "top_k",
    "repetition_penalty",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Fields of `nvext` that a body has too."""


def take_peer_fields(request: PeerFields) -> None:
    """Give a body the fields that its `nvext` has in their place.

    Raises:
        RequestError: a field has two values.
    """
    peer = request.nvext
    if peer is None:
        return
    given = {name: value for name in _SHARED if (value := getattr(peer, name)) is not None}
    if peer.greed_sampling:
        given["temperature"] = 0.0
    for name, value in given.items():
        own = getattr(request, name)
        if own is not None and own != value and name != "temperature":
            raise _wrong(f"nvext.{name}", f"got {value!r:.40}, but {name} is {own!r:.40}; send one of them")
        setattr(request, name, value)


def agent_options(request: AgentRequest) -> AgentOptions:
    """Check the fields and give what they say.

    Raises:
        RequestError: a value is out of its range, or is given twice.
    """
    if not (request.session or request.kv_retention or request.agent_hints or request.nvext):
        return _NO_OPTIONS
    peer = request.nvext or PeerBody()
    session, control = _session(request, peer)
    hints, where = _hints(request, peer)
    priority, output_tokens = hints.priority, hints.osl
    if priority is not None and abs(priority) > PRIORITY_MAX:
        raise _wrong(f"{where}.priority", f"must be >= -{PRIORITY_MAX} and <= {PRIORITY_MAX}, got {priority}")
    if output_tokens is not None and not 1 <= output_tokens <= _OUTPUT_TOKENS_MAX:
        raise _wrong(f"{where}.osl", f"must be >= 1 and < 2^31 tokens, got {output_tokens}")
    retention = _retention(request.kv_retention, priority)
    annotations_of(request)
    return AgentOptions(session, control, priority, output_tokens, bool(hints.speculative_prefill), retention)


FORMATTED_PROMPT, TOKEN_IDS = "formatted_prompt", "token_ids"
_QUERY = "query_instance_id"
_SILENT = "llm_metrics"
"""An annotation that Dynamo's own frontend leaves out of its streams."""


def annotations_of(request: AgentRequest) -> frozenset[str]:
    """Give the annotations that a stream of the answer begins with; unknown ones are logged once and have no effect.

    Raises:
        RequestError: one asks for no answer.
    """
    names = () if request.nvext is None else request.nvext.annotations or ()
    for name in names:
        if name.partition(":")[0] == _QUERY:
            problem = f"{_QUERY} is not served, as it asks where a request would go; ask POST /route of penstock router"
            raise _wrong("nvext.annotations", problem)
        if name not in (FORMATTED_PROMPT, TOKEN_IDS, _SILENT):
            name_once(f"nvext.annotations.{name}")
    return frozenset(names) & {FORMATTED_PROMPT, TOKEN_IDS}


def annotation_event(name: str, value: object) -> bytes:
    """Encode an annotation as Dynamo does: an event of its name without data, whose comment is the value as JSON."""
    return b"event: %b\n: %b\n\n" % (name.encode(), encode_json(value))


def _session(request: AgentRequest, peer: PeerBody) -> tuple[str | None, SessionControl | None]:
    own, its = request.session, peer.session_control
    if own is not None and its is not None:
        raise _wrong("nvext.session_control", "session is given too; send one of the two")
    if own is not None:
        control = _control(
            "session.action", own.action, "session.ttl_s", own.ttl_s, is_ephemeral=own.ephemeral
        )
        if own.ephemeral and control is None:
            raise _wrong("session.ephemeral", "is said with an action; add action: open or close")
        return _name("session.id", own.id), control
    if its is None:
        return None, None
    where = "nvext.session_control"
    control = _control(f"{where}.action", its.action, f"{where}.timeout", its.timeout, is_ephemeral=True)
    return _name(f"{where}.session_id", its.session_id), control


def _hints(request: AgentRequest, peer: PeerBody) -> tuple[AgentHintsBody, str]:
    """Give the hints, and where they stand in the body."""
    if request.agent_hints is not None and peer.agent_hints is not None:
        raise _wrong("nvext.agent_hints", "agent_hints is given too; send one of the two")
    if peer.agent_hints is not None:
        return peer.agent_hints, "nvext.agent_hints"
    return request.agent_hints or AgentHintsBody(), "agent_hints"


def _retention(own: RetentionBody | None, priority: int | None) -> KvRetention | None:
    """Give what a body says of its KV; without `kv_retention` the priority of the request is that of its KV too."""
    if own is None:
        if not priority:
            return None
        return KvRetention(priority=min(max(priority, KV_PRIORITY_MIN), KV_PRIORITY_MAX))
    if own.priority is None and own.ttl_s is None:
        raise _wrong("kv_retention", "says nothing; give priority, ttl_s or both")
    if own.priority is not None and not KV_PRIORITY_MIN <= own.priority <= KV_PRIORITY_MAX:
        problem = f"must be >= {KV_PRIORITY_MIN} and <= {KV_PRIORITY_MAX}, got {own.priority}"
        raise _wrong("kv_retention.priority", problem)
    if own.ttl_s is not None and not (own.ttl_s > 0 and math.isfinite(own.ttl_s)):
        raise _wrong("kv_retention.ttl_s", f"must be > 0 seconds, got {own.ttl_s:g}")
    return KvRetention(priority=1 if own.priority is None else own.priority, ttl_s=own.ttl_s)


def _name(where: str, name: str) -> str:
    if not 1 <= len(name) <= SESSION_CHARACTERS_MAX:
        raise _wrong(where, f"must have 1 to {SESSION_CHARACTERS_MAX} characters, got {len(name)}")
    return name


def _control(
    where: str, action: str | None, where_ttl: str, ttl_s: float | None, *, is_ephemeral: bool
) -> SessionControl | None:
    if action is not None and action not in _ACTIONS:
        raise _wrong(where, f"must be one of {', '.join(map(repr, _ACTIONS))}, got {action[:40]!r}")
    if ttl_s is not None and not (ttl_s > 0 and math.isfinite(ttl_s)):
        raise _wrong(where_ttl, f"must be > 0 seconds, got {ttl_s:g}")
    if ttl_s is not None and action != SessionAction.OPEN:
        raise _wrong(where_ttl, f"is said when a session is opened; add {where.rsplit('.', 1)[1]}: open")
    if action is None:
        return None
    return SessionControl(action=SessionAction(action), ttl_s=ttl_s, is_ephemeral=is_ephemeral)


def _wrong(where: str, problem: str) -> RequestError:
    return RequestError(f"{where}: {problem}", param=where)
