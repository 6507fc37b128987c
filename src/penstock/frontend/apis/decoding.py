"""Decodes request bodies of every API, and says what is wrong with one: the field, the expected value, the given value."""

import codecs
import contextlib
import enum
import gc
import json
import re
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np

from penstock.core.config import nearest
from penstock.core.errors import RequestError
from penstock.core.log import get_logger

_Body = TypeVar("_Body", bound=msgspec.Struct)

_WITHOUT_EFFECT = frozenset(
    {
        "request_id",  # the header X-Request-Id
        "rid",
        "guided_decoding_backend",
        "length_penalty",  # of beam search
        "early_stopping",
        "spaces_between_special_tokens",
        "mm_processor_kwargs",
        "return_cached_tokens_details",
        "timeout",  # LiteLLM sends its own to some servers
        "cache_control",
        "client_metadata",
        "context_management",
        "prompt_cache_options",
        "mcp_servers",  # tools that no server here runs, as those of other types in `tools`
        "betas",
        "billing_policy",
        "fallbacks",
        "fallback_credit_token",
        "user_profile_id",
        "workspace_id",
    }
)
"""Fields of other servers and of clients that change no answer here."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "typical_p": (1,),
    "skip_special_tokens": (True,),
    "detokenize": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "no_stop_trim": (False,),
    "repetition_detection": (None,),
}
"""Fields of vLLM or SGLang that only have no effect with one of these values."""
_NOT_SERVED = frozenset(
    {
        "use_beam_search",
        "truncate_prompt_tokens",
        "prompt_embeds",
        "logits_processors",
        "custom_logit_processor",
        "lora_path",
        "regex",
        "ebnf",
        "json_schema",
        "background",
        "conversation",
        "prompt",
        "moderation",
        "container",
        "compaction",
        "thread",
    }
)
"""Fields of other servers that would change an answer, and are no misspelt ones of ours."""
_SWITCHES = frozenset(
    {
        "enable_thinking",
        "enable_reasoning",
        "think",
        "thinking",
        "reasoning",
        "thinking_budget",
        "thinking_token_budget",
        "reasoning_budget",
    }
)
"""Fields of other servers by which false, or 0, turns off the reasoning that a model is used to."""
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$(.*)`)?", re.DOTALL)
_ROUNDS_MAX = 16
_NAMED_MAX = 256
_INT_MAX = 1 << 53
_named: set[str] = set()
_log = get_logger()


def decode_leniently(body: bytes, kind: type[_Body], problem: msgspec.ValidationError) -> _Body:
    """Decode a body that is not a `kind` to the letter.

    Args:
        body: valid JSON.
        kind: the struct of the body.
        problem: why the strict decoder refused it.

    Raises:
        ValidationError: it says something that would have an effect, or `strict` is true.
    """
    try:
        fields = msgspec.json.decode(body)
    except msgspec.ValidationError:  # a number out of range
        raise problem from None
    if not isinstance(fields, dict) or fields.get("strict") is True:
        raise problem
    _conform(fields, kind)
    for _ in range(_ROUNDS_MAX):
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            if not _drop_unknown(fields, str(error), kind):
                raise
    raise problem


def _drop_unknown(fields: dict[str, Any], problem: str, kind: type[msgspec.Struct]) -> bool:
    """Drop the unknown field that a problem names, and other neutral ones beside it in the body itself; False if it stays."""
    found = _UNKNOWN.fullmatch(problem)
    if found is None:
        return False
    unknown, path = found[1], found[2] or ""
    place: Any = fields
    for part in filter(None, path.split(".")):
        place = place.get(part) if isinstance(place, dict) else None
    if not isinstance(place, dict) or not _is_neutral(unknown, place.get(unknown)):
        return False
    others = () if path else set(place) - {field.encode_name for field in msgspec.structs.fields(kind)}
    for name in {unknown, *(name for name in others if _is_neutral(name, place[name]))}:
        del place[name]
        name_once(f"{path}.{name}".lstrip("."))
    return True


def _is_neutral(name: str, value: Any) -> bool:
    if name in _SWITCHES:
        return value is None
    if name in _NEUTRAL:
        return value is None or value in _NEUTRAL[name]
    return name in _WITHOUT_EFFECT or value is None or value in (False, "", [], {})  # 0 equals False


def served_values(name: str) -> str | None:
    """Say which values of another server's field are served, as JSON; "" for none, and None for a field that is not known."""
    if name in _NEUTRAL:
        return " or ".join(json.dumps(value) for value in _NEUTRAL[name])
    return "" if name in _NOT_SERVED | _SWITCHES else None


def name_once(field: str) -> None:
    """Log a dropped field, once in this process."""
    if field in _named or len(_named) >= _NAMED_MAX:
        return
    _named.add(field)
    _log.info("field_without_effect", field=field[:80])


def _conform(fields: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    """Make whole numbers integers where integers are wanted, as some clients write 4 as 4.0, and leave out null where it says nothing."""
    for field in msgspec.structs.fields(kind):
        name, value = field.encode_name, fields.get(field.encode_name)
        if value is not None:
            fields[name] = _conforming(value, field.type)
        elif name in fields and not field.required and types.NoneType not in _options(field.type):
            del fields[name]


def _conforming(value: Any, annotation: Any) -> Any:
    options = _options(annotation)
    if isinstance(value, float):
        is_whole = value.is_integer() and abs(value) <= _INT_MAX
        return int(value) if is_whole and int in options and float not in options else value
    if isinstance(value, dict):
        for option in options:
            if isinstance(option, type) and issubclass(option, msgspec.Struct):
                _conform(value, option)
    elif isinstance(value, list):
        for option in options:
            if typing.get_origin(option) is list:
                (wanted,) = typing.get_args(option)
                return [_conforming(item, wanted) for item in value]
    return value


@cache
def _options(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


_Request = TypeVar("_Request", bound=msgspec.Struct)

_SHOWN_MAX = 40
LEVELS_MAX = 500
"""Levels of a body's JSON. Python 3.11 may recurse 1,000 times, and half of that is left to a body."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
"""A string of JSON, or the rest of a body from a quote that nothing closes: each byte is looked at once."""
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""An escape of JSON, of a whole surrogate pair both; the group is half of one."""
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_JSON_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


_SMALL_BYTES = 16_384
"""Bodies up to here have too few objects for more than one collection while they are decoded."""


def decode_body(body: bytes, kind: type[_Request]) -> _Request:
    """Decode a JSON body to the letter.

    Raises:
        RequestError: it is no `kind`.
    """
    try:
        check_levels(body)
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise body_error(error, body, kind) from error


def parse_body(body: bytes, kind: type[_Request], decode: Callable[[bytes], _Request]) -> _Request:
    """Decode a body of any API.

    Raises:
        RequestError: not JSON, a wrong type, a missing or an unknown field.
    """
    try:
        check_levels(body)
        if len(body) <= _SMALL_BYTES:
            return _decode(body, kind, decode)
        with _no_collections():
            return _decode(body, kind, decode)
    except (ValueError, RecursionError) as error:
        raise body_error(error, body, kind) from error


def _decode(body: bytes, kind: type[_Request], decode: Callable[[bytes], _Request]) -> _Request:
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        return decode_leniently(body, kind, error)
    except msgspec.DecodeError:
        whole = without_half_pairs(body)
        if whole == body:
            raise
        request = _decode(whole, kind, decode)
        if getattr(request, "strict", None) is True:
            raise
        name_once("half of a surrogate pair")
        return request


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Pause garbage collection while decoding: it would scan the body's growing lists repeatedly and make decoding 4 times slower."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def body_error(error: Exception, body: bytes, kind: type[msgspec.Struct]) -> RequestError:
    """Explain why `body` could not be decoded as a `kind`.

    Args:
        error: what msgspec's decoder raised: a ValueError or a RecursionError.
        body: the bytes given to the decoder.
        kind: the expected struct.
    """
    if isinstance(error, msgspec.ValidationError):
        return _content_error(str(error), body, kind)
    if isinstance(error, RecursionError):
        return nested_too_deeply()
    fault, fix = _fault(error, body)
    return RequestError(f"the body {fault}; {fix}")


def _fault(error: Exception, body: bytes) -> tuple[str, str]:
    """Give why bytes are no JSON, and the fix: the decoder's own error does not tell one fault from another in all versions of msgspec."""
    if not body:
        return "is empty", "expected a JSON object"
    try:
        body.decode()
    except UnicodeDecodeError as undecodable:
        return f"is not valid UTF-8: {undecodable.reason}", "send JSON encoded as UTF-8"
    if body.startswith(codecs.BOM_UTF8):
        return "begins with a byte order mark", "send UTF-8 without one"
    if without_half_pairs(body) != body:
        return "has half of a surrogate pair, such as \\ud83d without what follows", "send whole characters"
    return f"is not valid JSON: {error}", "send a JSON object"


def without_half_pairs(body: bytes) -> bytes:
    """Replace escapes of half a surrogate pair by U+FFFD: clients that cut texts by UTF-16 units send them."""
    return _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], body) if rb"\u" in body else body


def check_levels(body: bytes) -> None:
    """Check how deeply a body of JSON is nested, before it is decoded.

    From Python 3.12 on the decoder follows more levels than Python's own functions, which read the values after it.

    Raises:
        RecursionError: more than `LEVELS_MAX` levels.
    """
    if body.count(b"[") + body.count(b"{") <= LEVELS_MAX:
        return
    brackets = np.frombuffer(_STRING.sub(b"", body).translate(None, _NO_BRACKETS), np.uint8)
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    if int(np.cumsum(np.where(opens, 1, -1), dtype=np.int32).max(initial=0)) > LEVELS_MAX:
        raise RecursionError


def nested_too_deeply() -> RequestError:
    """Make the error for a body of more than `LEVELS_MAX` levels."""
    return RequestError(f"the body is nested too deeply; expected at most {LEVELS_MAX} levels")


def _content_error(problem: str, body: bytes, kind: type[msgspec.Struct]) -> RequestError:
    problem, _, path = problem.replace("`", "").partition(" - at $")
    path = path.removeprefix(".")
    if unknown := re.fullmatch("Object contains unknown field (.*)", problem):
        param = f"{path}.{unknown[1]}".removeprefix(".")
        served = None if path else served_values(unknown[1])
        if served == "":
            return RequestError("not supported by this server; leave it out", field=param)
        if served:
            given = _given(body, param)
            return RequestError(f"only {served} is served here{given}; leave it out", field=param)
        hint = "" if path else nearest(unknown[1], list(kind.__struct_fields__))
        field = param if unknown[1] else f"{param}''"
        return RequestError(
            f"unknown field{hint if 'did you mean' in hint else ''}", field=field, param=param
        )
    if missing := re.fullmatch("Object missing required field (.*)", problem):
        return RequestError("required, but missing", field=f"{path}.{missing[1]}".removeprefix("."))
    if word := re.fullmatch("Invalid enum value (.*)", problem):
        return RequestError(f"must be one of {_words(kind, path)}, got {word[1]}", field=path)
    if re.fullmatch(r"Expected int( \| null)?, got float", problem):
        problem = f"must be a whole number{_given(body, path)}"
    elif problem.startswith("Expected "):
        problem += _shown(body, path)
        problem = re.sub(r"\b(str|int|float|bool)\b", lambda name: _JSON_NAMES[name[0]], problem, count=4)
    problem = problem[:1].lower() + problem[1:].replace(" | ", " or ")
    refusal = RequestError(problem, field=path or "the body")
    refusal.param = path or None
    return refusal


def _shown(body: bytes, path: str) -> str:
    """Show the value at `path`, shortened; empty where it is an object or a list, or cannot be found."""
    value = _value(body, path)
    return f" {repr(value)[:_SHOWN_MAX]}" if isinstance(value, str | int | float) else ""


def _given(body: bytes, path: str) -> str:
    """Say which value stands at `path`, shortened; empty if it cannot be found."""
    value = _value(body, path)
    if isinstance(value, dict | list):
        return f", got an {'object' if isinstance(value, dict) else 'array'}"
    return "" if value is None else f", got {json.dumps(value)[:_SHOWN_MAX]}"


def _value(body: bytes, path: str) -> Any:
    """Give the value at `path`; None if it cannot be found."""
    try:
        value = msgspec.json.decode(body)
        for part in re.findall(r"[^.\[\]]+", path):
            value = value[int(part) if isinstance(value, list) else part]
    except (LookupError, ValueError, TypeError, RecursionError):  # a key with a dot, or nested too deeply
        return None
    return value


def _words(kind: type[msgspec.Struct], name: str) -> str:
    """List the values of a field that is an enum."""
    (allowed,) = (field.type for field in msgspec.structs.fields(kind) if field.encode_name == name)
    assert isinstance(allowed, enum.EnumMeta), f"{kind.__name__}.{name}: enums are fields of the body itself"
    members: list[enum.Enum] = list(allowed)
    return ", ".join(repr(member.value) for member in members)
