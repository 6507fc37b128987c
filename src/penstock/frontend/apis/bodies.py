"""Request bodies of the OpenAI API, as far as Penstock serves it.

Unsupported fields that would change the answer are declared too, so that a request with one is refused by name
(`checks.py`) and never answered wrongly.
"""

import binascii
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.core.json_text import encode_json
from penstock.core.types.requests import (
    KV_PRIORITY_MAX,
    KV_PRIORITY_MIN,
    KvRetention,
)
from penstock.core.wire import Wire
from penstock.frontend.apis.decoding import name_once, parse_body

SESSION_CHARACTERS_MAX = 256
PRIORITY_MAX = 1000
_OUTPUT_TOKENS_MAX = (1 << 31) - 1
_OPEN = "open"
_ACTIONS = (_OPEN, "close")


PART_TYPES = {"image_url": "image", "input_audio": "audio", "audio_url": "audio", "video_url": "video"}
"""Types of content parts that hold media, and their modality."""
TEXT_TYPES = ("text", "refusal")
_QUOTED = 80


class MediaUrl(msgspec.Struct, kw_only=True):
    url: str
    detail: str | None = None  # accepted, no effect: the model's processor chooses the size


class InputAudio(msgspec.Struct, kw_only=True):
    data: str
    format: str


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: MediaUrl | str | None = None
    audio_url: MediaUrl | str | None = None
    video_url: MediaUrl | str | None = None
    input_audio: InputAudio | None = None

    @property
    def words(self) -> str | None:
        """The text of a part without media; None for one with media."""
        if self.type not in TEXT_TYPES:
            return None
        return (self.refusal if self.type == "refusal" else self.text) or ""


class MediaPart(Wire, frozen=True):
    """One item of a message: its bytes, or the http(s) URL to fetch them from. `param` is its field in the body."""

    modality: str
    param: str
    data: bytes = b""
    url: str | None = None


def check_part(part: ContentPart, where: str) -> None:
    """Check a content part's type, and that what the type names is there.

    Raises:
        RequestError: it is not.
    """
    if part.type not in TEXT_TYPES and part.type not in PART_TYPES:
        raise RequestError(
            f"{part.type!r} is not supported; send parts of type 'text', or of"
            f" {', '.join(PART_TYPES)} where the model takes them",
            field=f"{where}.type",
        )
    if getattr(part, part.type) is None:
        raise RequestError("required, but missing", field=f"{where}.{part.type}")


def media_part(part: ContentPart, where: str) -> MediaPart:
    """Decode a checked part that holds media.

    Raises:
        RequestError: a broken data URL or base64, or a URL of another kind than http, https and data.
    """
    modality, param = PART_TYPES[part.type], f"{where}.{part.type}"
    content: Any = getattr(part, part.type)
    if isinstance(content, InputAudio):
        return MediaPart(modality=modality, param=param, data=_decoded(content.data, param, f"{param}.data"))
    url = content.url if isinstance(content, MediaUrl) else content
    scheme = url[:8].partition(":")[0].lower()
    if scheme in {"http", "https"}:
        return MediaPart(modality=modality, param=param, url=url)
    if scheme != "data":
        raise RequestError(
            f"must be a data URL such as data:{modality}/...;base64,..., or an http(s) URL, got {url[:_QUOTED]!r}",
            field=f"{param}.url",
            param=param,
        )
    head, comma, body = url[len("data:") :].partition(",")
    kind, *options = head.lower().split(";")
    if not comma or "base64" not in options:
        raise RequestError(
            f"must be data:{modality}/...;base64,..., got {url[:_QUOTED]!r} without base64 data",
            field=f"{param}.url",
            param=param,
        )
    if not kind.startswith(f"{modality}/"):
        raise RequestError(
            f"its data must be of a type {modality}/..., got {kind[:_QUOTED]!r}; name the file's own type",
            field=f"{param}.url",
            param=param,
        )
    return MediaPart(modality=modality, param=param, data=_decoded(body, param, f"{param}.url"))


def _decoded(text: str, param: str, name: str) -> bytes:
    try:
        data = binascii.a2b_base64(text.encode(), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise RequestError(
            f"not base64: {error}; encode the file with padding and without spaces", field=name, param=param
        ) from error
    if not data:
        raise RequestError("has no data; send the file's bytes in base64", field=name, param=param)
    return data


def placeholders(modalities: Sequence[str], text: str, placeholder_of: dict[str, str]) -> str:
    """Put before a text the placeholders of the media that it does not place itself, one a line, as vLLM does.

    Args:
        modalities: of the message's media, in order.
        text: of the message.
        placeholder_of: by modality; `{n}` in one stands for the item's number among those of its modality.
    """
    counts: dict[str, int] = {}
    lines: list[str] = []
    left = text
    for modality in modalities:
        counts[modality] = counts.get(modality, 0) + 1
        mark = placeholder_of[modality].replace("{n}", str(counts[modality]))
        if mark and mark in left:
            left = left.replace(mark, "", 1)
        else:
            lines.append(mark)
    return "\n".join([*lines, text])


class SessionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`session` of a body: its name. The other fields are checked, and have no effect."""

    id: str
    action: str | None = None
    ttl_s: float | None = None
    ephemeral: bool = False


class AgentHintsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`agent_hints` of a body. None: not given."""

    priority: int | None = None
    osl: int | None = None
    speculative_prefill: bool | None = None  # accepted, no effect


class RetentionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`kv_retention` of a body: how long the request's KV is kept, against other KV that nobody uses."""

    priority: int | None = None
    ttl_s: float | None = None


class PeerSessionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`nvext.session_control`: the session's name. The other fields are checked, and have no effect."""

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


class AgentOptions(msgspec.Struct, frozen=True):
    """What a body says of its session, and its hints; None where it says nothing."""

    session: str | None = None
    priority: int | None = None
    output_tokens: int | None = None
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


def take_peer_fields(request: "GenerationRequest") -> None:
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
            raise RequestError(
                f"got {value!r:.40}, but {name} is {own!r:.40}; send one of them", field=f"nvext.{name}"
            )
        setattr(request, name, value)


def agent_options(request: "GenerationRequest") -> AgentOptions:
    """Check the fields and give what they say.

    Raises:
        RequestError: a value is out of its range, or is given twice.
    """
    if not (request.session or request.kv_retention or request.agent_hints or request.nvext):
        return _NO_OPTIONS
    peer = request.nvext or PeerBody()
    session = _session(request, peer)
    hints, where = _hints(request, peer)
    priority, output_tokens = hints.priority, hints.osl
    if priority is not None and abs(priority) > PRIORITY_MAX:
        raise RequestError(
            f"must be >= -{PRIORITY_MAX} and <= {PRIORITY_MAX}, got {priority}", field=f"{where}.priority"
        )
    if output_tokens is not None and not 1 <= output_tokens <= _OUTPUT_TOKENS_MAX:
        raise RequestError(f"must be >= 1 and < 2^31 tokens, got {output_tokens}", field=f"{where}.osl")
    retention = _retention(request.kv_retention, priority)
    annotations_of(request)
    return AgentOptions(session, priority, output_tokens, retention)


FORMATTED_PROMPT, TOKEN_IDS = "formatted_prompt", "token_ids"
_QUERY = "query_instance_id"
_SILENT = "llm_metrics"
"""An annotation that Dynamo's own frontend leaves out of its streams."""


def annotations_of(request: "GenerationRequest") -> frozenset[str]:
    """Give the annotations that a stream of the answer begins with; unknown ones are logged once and have no effect.

    Raises:
        RequestError: one asks for no answer.
    """
    names = () if request.nvext is None else request.nvext.annotations or ()
    for name in names:
        if name.partition(":")[0] == _QUERY:
            problem = f"{_QUERY} is not served, as it asks where a request would go; ask POST /route of penstock router"
            raise RequestError(problem, field="nvext.annotations")
        if name not in (FORMATTED_PROMPT, TOKEN_IDS, _SILENT):
            name_once(f"nvext.annotations.{name}")
    return frozenset(names) & {FORMATTED_PROMPT, TOKEN_IDS}


def annotation_event(name: str, value: object) -> bytes:
    """Encode an annotation as Dynamo does: an event of its name without data, whose comment is the value as JSON."""
    return b"event: %b\n: %b\n\n" % (name.encode(), encode_json(value))


def _session(request: "GenerationRequest", peer: PeerBody) -> str | None:
    """Check the fields of a session, and give its name; None without one."""
    own, its = request.session, peer.session_control
    if own is not None and its is not None:
        raise RequestError("session is given too; send one of the two", field="nvext.session_control")
    if own is not None:
        _check_action("session.action", own.action, "session.ttl_s", own.ttl_s)
        if own.ephemeral and own.action is None:
            raise RequestError("is said with an action; add action: open or close", field="session.ephemeral")
        return _name("session.id", own.id)
    if its is None:
        return None
    where = "nvext.session_control"
    _check_action(f"{where}.action", its.action, f"{where}.timeout", its.timeout)
    return _name(f"{where}.session_id", its.session_id)


def _hints(request: "GenerationRequest", peer: PeerBody) -> tuple[AgentHintsBody, str]:
    """Give the hints, and where they stand in the body."""
    if request.agent_hints is not None and peer.agent_hints is not None:
        raise RequestError("agent_hints is given too; send one of the two", field="nvext.agent_hints")
    if peer.agent_hints is not None:
        return peer.agent_hints, "nvext.agent_hints"
    return request.agent_hints or AgentHintsBody(), "agent_hints"


def _retention(own: RetentionBody | None, priority: int | None) -> KvRetention | None:
    """Give the retention of a request's KV; without `kv_retention` the KV has the priority of the request."""
    if own is None:
        if not priority:
            return None
        return KvRetention(priority=min(max(priority, KV_PRIORITY_MIN), KV_PRIORITY_MAX))
    if own.priority is None and own.ttl_s is None:
        raise RequestError("says nothing; give priority, ttl_s or both", field="kv_retention")
    if own.priority is not None and not KV_PRIORITY_MIN <= own.priority <= KV_PRIORITY_MAX:
        problem = f"must be >= {KV_PRIORITY_MIN} and <= {KV_PRIORITY_MAX}, got {own.priority}"
        raise RequestError(problem, field="kv_retention.priority")
    if own.ttl_s is not None and not (own.ttl_s > 0 and math.isfinite(own.ttl_s)):
        raise RequestError(f"must be > 0 seconds, got {own.ttl_s:g}", field="kv_retention.ttl_s")
    return KvRetention(priority=1 if own.priority is None else own.priority, ttl_s=own.ttl_s)


def _name(where: str, name: str) -> str:
    if not 1 <= len(name) <= SESSION_CHARACTERS_MAX:
        raise RequestError(
            f"must have 1 to {SESSION_CHARACTERS_MAX} characters, got {len(name)}", field=where
        )
    return name


def _check_action(where: str, action: str | None, where_ttl: str, ttl_s: float | None) -> None:
    if action is not None and action not in _ACTIONS:
        raise RequestError(
            f"must be one of {', '.join(map(repr, _ACTIONS))}, got {action[:40]!r}", field=where
        )
    if ttl_s is not None and not (ttl_s > 0 and math.isfinite(ttl_s)):
        raise RequestError(f"must be > 0 seconds, got {ttl_s:g}", field=where_ttl)
    if ttl_s is not None and action != _OPEN:
        raise RequestError(
            f"is said when a session is opened; add {where.rsplit('.', 1)[1]}: open", field=where_ttl
        )


STOPS_MAX = 16
STOP_CHARACTERS_MAX = 1024


class StrictBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of request bodies: an unknown field is an error, unless it has no effect (`decoding.py`)."""


class StreamOptions(StrictBody, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = None  # accepted, no effect


class SamplingExtensions(StrictBody, kw_only=True):
    """Fields beyond those of any API's own, with the names vLLM and SGLang use. None: not given."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    seed: int | None = None

    def extend(self, request: "SamplingExtensions") -> None:
        """Copy these fields to a request."""
        for name in SamplingExtensions.__struct_fields__:
            setattr(request, name, getattr(self, name))


class GenerationRequest(SamplingExtensions, kw_only=True):
    """Fields of both chat and text completions. None: not given."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    temperature: float | None = None
    response_format: Any = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    structured_outputs: Any = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    add_special_tokens: bool | None = None
    strict: bool | None = None  # true: unknown fields are refused, whatever their value
    # What agents say.
    session: SessionBody | None = None
    kv_retention: RetentionBody | None = None
    agent_hints: AgentHintsBody | None = None
    nvext: PeerBody | None = None
    # Accepted, no effect on the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class Message(msgspec.Struct, kw_only=True):
    """One message; unknown fields, such as those copied from an earlier answer, are ignored."""

    role: str
    content: str | list[ContentPart] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name for the same
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # Accepted, no effect on the answer.
    prediction: Any = None
    verbosity: Any = None
    # Refused unless they ask for nothing.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None


class ContinuationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Says that an answer goes on: the last `num_emitted` tokens of the prompt are its own, of choice `choice` of its request."""

    num_emitted: int
    choice: int = 0


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    continuation: ContinuationBody | None = None
    best_of: int | None = None
    suffix: Any = None  # refused unless it asks for nothing

    @property
    def answers_per_prompt(self) -> int:
        """Answers to make for each prompt; `n` of them are given."""
        return max(self.n or 1, self.best_of or 1)


_decode_chat = msgspec.json.Decoder(ChatRequest).decode
_decode_completion = msgspec.json.Decoder(CompletionRequest).decode


def parse_chat(body: bytes) -> ChatRequest:
    """Decode a chat request; `validation.check_chat` checks its values.

    Raises:
        RequestError: not JSON, a wrong type, a missing or an unknown field, or one that `nvext` contradicts.
    """
    request = parse_body(body, ChatRequest, _decode_chat)
    take_peer_fields(request)
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Decode a completion request; `validation.check_completion` checks its values.

    Raises:
        RequestError: not JSON, a wrong type, a missing or an unknown field, or one that `nvext` contradicts.
    """
    request = parse_body(body, CompletionRequest, _decode_completion)
    take_peer_fields(request)
    return request
