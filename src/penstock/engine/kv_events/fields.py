"""Reads msgpack messages part by part, after a check of each part's length: 8 MiB of empty arrays take seconds to decode."""

import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from penstock.core.errors import ProtocolError

VALUES_MAX = 1 << 20
"""Tokens, or blocks, of one event: those of a prompt of a million tokens."""
_FIELDS_MAX = 64
_QUOTED_BYTES = 256
_NIL = 0xC0
_HEADER_BYTES = 5
_ARRAY, _MAP = ((0x90, 0xDC, 0xDD), (0x80, 0xDE, 0xDF))
"""First bytes of what has up to 15 elements, and of what says its length in 2 and in 4 bytes."""
_ERRORS = (msgspec.DecodeError, ValueError, TypeError, RecursionError, MemoryError, OverflowError)

_ITEMS = msgspec.msgpack.Decoder(list[Raw])
_NAMED = msgspec.msgpack.Decoder(dict[str, Raw])
_TEXT: msgspec.msgpack.Decoder[str | None] = msgspec.msgpack.Decoder(str | None)
_INTEGER: msgspec.msgpack.Decoder[int | None] = msgspec.msgpack.Decoder(int | None)
_PAIR = msgspec.msgpack.Decoder(tuple[str, int])
_INTEGERS = msgspec.msgpack.Decoder(list[int])
_HASH: msgspec.msgpack.Decoder[int | bytes | None] = msgspec.msgpack.Decoder(int | bytes | None)
_HASHES = msgspec.msgpack.Decoder(list[int | bytes])

Fields = Mapping[str, Raw]
"""Fields of an event by name, not decoded. One that is missing reads as null."""

_T = TypeVar("_T")


def items(raw: Raw | bytes, what: str, expected: str, most: int = _FIELDS_MAX) -> list[Raw]:
    """Give an array's elements, not decoded.

    Raises:
        ProtocolError: it is no array, or has more than `most` elements. The other functions raise it likewise.
    """
    _bound(raw, _ARRAY, what, expected, most)
    return _decode(_ITEMS, raw, what, expected)


def event(raw: Raw) -> dict[str, Raw] | list[Raw]:
    """Give an event's fields: those of a map by name, or the elements of an array."""
    if _length(raw, _MAP) is None:
        return items(raw, "event", "a map or an array")
    _bound(raw, _MAP, "event", "a map or an array", _FIELDS_MAX)
    return _decode(_NAMED, raw, "event", "a map or an array")


def text(fields: Fields, name: str) -> str | None:
    raw = fields.get(name)
    return None if raw is None else _decode(_TEXT, raw, name, "a string")


def integer(fields: Fields, name: str) -> int | None:
    raw = fields.get(name)
    return None if raw is None else _decode(_INTEGER, raw, name, "an integer")


def integers(fields: Fields, name: str) -> list[int]:
    """Give an array of integers; empty: it is null."""
    if is_null(fields, name):
        return []
    raw = fields[name]
    _bound(raw, _ARRAY, name, "an array", VALUES_MAX)
    return _decode(_INTEGERS, raw, name, "integers")


def block_hash(fields: Fields, name: str) -> int | bytes | None:
    raw = fields.get(name)
    return None if raw is None else _decode(_HASH, raw, name, "a block hash: an integer or bytes")


def block_hashes(fields: Fields, name: str) -> list[int | bytes]:
    raw = fields.get(name, b"\xc0")
    _bound(raw, _ARRAY, name, "an array", VALUES_MAX)
    return _decode(_HASHES, raw, name, "block hashes: integers or bytes")


def arrays(fields: Fields, name: str) -> list[Raw]:
    """Give an array's elements, not decoded; empty: it is null."""
    return [] if is_null(fields, name) else items(fields[name], name, "an array", VALUES_MAX)


def as_text(raw: Raw) -> str | None:
    """Give a string; None: it is something else."""
    try:
        return _TEXT.decode(raw)
    except _ERRORS:
        return None


def as_pair(raw: Raw) -> tuple[str, int] | None:
    """Give a string and an integer; None: it is something else."""
    try:
        return _PAIR.decode(raw)
    except _ERRORS:
        return None


def is_null(fields: Fields, name: str) -> bool:
    raw = fields.get(name)
    return raw is None or is_nil(raw)


def is_nil(raw: Raw) -> bool:
    return memoryview(raw)[0] == _NIL


def refused(what: str, value: Any, expected: str) -> ProtocolError:
    """Make the error of a value; a short one of msgpack is decoded."""
    if isinstance(value, Raw | bytes):
        value = f"{len(value)} bytes" if len(value) > _QUOTED_BYTES else _peek(value)
    return ProtocolError(f"KV events: {what}: expected {expected}, got {reprlib.repr(value)[:100]}")


def _bound(raw: Raw | bytes, headers: tuple[int, int, int], what: str, expected: str, most: int) -> None:
    length = _length(raw, headers)
    if length is None:
        raise refused(what, raw, expected)
    if length > most:
        raise ProtocolError(f"KV events: {what}: expected at most {most} elements, got {length}")


def _length(raw: Raw | bytes, headers: tuple[int, int, int]) -> int | None:
    """Read the length of an array or map from its first bytes; None: it is something else."""
    head = bytes(memoryview(raw)[:_HEADER_BYTES])
    short, middle, long = headers
    first = head[0] if head else _NIL
    if first & 0xF0 == short:
        return first & 0x0F
    if first == middle:
        return int.from_bytes(head[1:3], "big")
    return int.from_bytes(head[1:], "big") if first == long else None


def _decode(decoder: msgspec.msgpack.Decoder[_T], raw: Raw | bytes, what: str, expected: str) -> _T:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError:
        raise refused(what, raw, expected) from None
    except _ERRORS as error:
        raise ProtocolError(f"KV events: {what}: not msgpack ({error})") from None


def _peek(raw: Raw | bytes) -> Any:
    try:
        return msgspec.msgpack.decode(raw)
    except _ERRORS:
        return bytes(raw)
