"""What request bodies may say without effect: fields of other servers, unknown fields with a neutral value, whole numbers as 4.0.

Runs only on bodies that the strict decoder refused, so that usual requests do not pay for it.
"""

import json
import re
import types
import typing
from functools import cache
from typing import Any, TypeVar

import msgspec

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
