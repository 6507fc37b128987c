"""`SamplingParams.structured` as a grammar of llguidance."""

import re
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from penstock.core.errors import RequestError

CONSTRAINT_BYTES_MAX = 1 << 20
GRAMMAR_CHARACTERS_MAX = 1 << 16
"""GBNF is converted in Python, which takes 0.1 s for so much of it."""
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_ERROR_CHARACTERS_MAX = 300
_PLAIN = {
    r"\bNoExtension(Bias)?\b": "no text can match it",
    r"oneOf constraints are not supported\. Enable '\w+' option to approximate oneOf with anyOf": "two options of oneOf may"
    " match the same value, which no grammar can exclude; write anyOf, or give each option a constant of its own",
    r"Unimplemented keys: ": "keys that no grammar can keep to: ",
}
"""Patterns in llguidance's errors, and what is said instead."""
_JSON = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
"""A model that has nothing to say must not write white space for ever."""


def llguidance_grammar(structured: bytes) -> str:
    """Translate a constraint, which may still turn out not to compile.

    Args:
        structured: as in `SamplingParams`.

    Raises:
        RequestError: it is malformed, too large, or of a kind that this engine does not have.
    """
    if len(structured) > CONSTRAINT_BYTES_MAX:
        raise refusal(f"{len(structured)} bytes; at most {CONSTRAINT_BYTES_MAX} are allowed")
    try:
        fields = msgspec.json.decode(structured, type=dict[str, Any])
        kind, value = next((kind, value) for kind in _KINDS if (value := fields.get(kind)) is not None)
    except (msgspec.MsgspecError, RecursionError, StopIteration) as error:
        raise refusal(
            f"expected a JSON object with one of {', '.join(_KINDS)}, which is what the engine paged keeps to"
        ) from error
    try:
        return _TRANSLATE[kind](value)
    except (ValueError, TypeError, RecursionError, IndexError, KeyError) as error:
        raise refusal(f"{kind}: {plain(str(error))}") from error


def refusal(why: str) -> RequestError:
    """Make the error for a constraint that this engine cannot keep to."""
    return RequestError(
        f"response_format: {why}; simplify the schema, regex or grammar, or leave it out",
        param="response_format",
    )


def plain(error: str) -> str:
    """Say llguidance's error in one line, without the names of its own options and states."""
    line = " ".join(error.replace("<non-verbose/>", "").split())
    for theirs, ours in _PLAIN.items():
        line = re.sub(theirs, ours, line)
    return line[:_ERROR_CHARACTERS_MAX]


def _json(schema: Any) -> str:
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return LLMatcher.grammar_from_json_schema(text, defaults=_JSON)  # type: ignore[arg-type]  # every key is optional


def _json_object(_: Any) -> str:
    return _json({"type": "object"})


def _regex(regex: Any) -> str:
    if not isinstance(regex, str):
        raise TypeError(f"must be a string, got {type(regex).__name__}")
    return LLMatcher.grammar_from_regex(regex)


def _choice(choices: Any) -> str:
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(each, str) and each for each in choices)
    ):
        raise TypeError("must be a list of strings, none of them empty")
    options = " | ".join(msgspec.json.encode(each).decode() for each in choices)
    return LLMatcher.grammar_from_lark(f"start: {options}")


def _grammar(grammar: Any) -> str:
    if not isinstance(grammar, str) or len(grammar) > GRAMMAR_CHARACTERS_MAX:
        raise TypeError(f"must be a string of at most {GRAMMAR_CHARACTERS_MAX} characters, in GBNF or Lark")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(grammar))
    except Exception as error:  # the converter raises nothing narrower
        raise ValueError(str(error)) from error


_TRANSLATE = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
