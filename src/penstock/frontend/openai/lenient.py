"""What request bodies may say without effect: fields of other servers, unknown fields with a neutral value, whole numbers as 4.0.

Runs only on bodies that the strict decoder refused, so that usual requests do not pay for it.
"""

import re
import types
import typing
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
    }
)
"""Fields that vLLM or SGLang take and that change no answer here."""
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
    _round_numbers(fields, kind)
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
    if name in _NEUTRAL:
        return value is None or value in _NEUTRAL[name]
    return name in _WITHOUT_EFFECT or value is None or value in (False, "", [], {})  # 0 equals False


def name_once(field: str) -> None:
    """Log a dropped field, once in this process."""
    if field in _named or len(_named) >= _NAMED_MAX:
        return
    _named.add(field)
    _log.info("field_without_effect", field=field[:80])


def _round_numbers(fields: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    """Make whole numbers integers where the body wants integers: some clients write 4 as 4.0."""
    for field in msgspec.structs.fields(kind):
        value = fields.get(field.encode_name)
        if (
            isinstance(value, float)
            and value.is_integer()
            and abs(value) <= _INT_MAX
            and _takes_int(field.type)
        ):
            fields[field.encode_name] = int(value)


def _takes_int(annotation: Any) -> bool:
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return int in options and float not in options
