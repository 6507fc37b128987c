"""Decodes KV event messages of vLLM and SGLang: one msgpack array `[time, events, data-parallel rank]` per engine step.

An event is a map with its type under `type`, or in older versions an array that begins with it. Field names and the order of
array elements are those of vLLM's `vllm/distributed/kv_events.py` (0.32), which SGLang's maps share.
"""

import reprlib
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from penstock.core.errors import ProtocolError
from penstock.core.log import get_logger
from penstock.core.types.events import Tier
from penstock.core.wire import NO_TOKENS, PackedTokens
from penstock.engine.kv_events.events import (
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
    Omission,
    Omissions,
    unsigned,
)

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


def event_fields(raw: Raw) -> dict[str, Raw] | list[Raw]:
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
    """Read the length of an array or map from its first bytes; None for another value."""
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


_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys", "group_idx",
    "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id",
)  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx", "locality", "ownership")
_ONLY_IN_MAPS = ("type", "cache_salt")
_MEDIA = {
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.OBJECT,
}
_WHOLE_CONTEXT = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of attention whose blocks stay as long as the prompt does."""
_WINDOWS = frozenset({"sliding_window", "sliding_window_mla"})
_GROUPS_MAX = 64
_HASH_BYTES_MAX = 64
_SHAPES_MAX = 64
_COMPLAINTS_MAX = 3
_TOKEN_BYTES = 4
EVENTS_MAX = 1 << 19
"""Events of one message: 8 MiB of the shortest."""
_EVENTS_AT_ONCE = 256
_BYTES_AT_ONCE = 1 << 18
_BATCH = "[time, events, rank]"
_log = get_logger()


class EventDecoder:
    """Decodes one publisher's messages.

    Of several groups of layers the first one with attention over the whole context tells the tokens. Blocks of others have the
    same hashes: those of sliding windows, and of further groups over the whole context, differ from it in `group`.
    """

    def __init__(self, block_size: int, omissions: Omissions) -> None:
        """Make a decoder.

        Args:
            block_size: tokens in a block of the model here; blocks of another size are left out.
            omissions: counts what is left out.
        """
        self._block_size = block_size
        self._omissions = omissions
        self._group: int | None = None
        self._needed: dict[int, int | None] = {}
        """By other group: last blocks of a prefix that it needs; None: all."""
        self._other_sizes: set[int] = set()  # that were complained of
        self._shapes: set[tuple[str, ...]] = set()  # names of maps' fields, all of them known
        self._kinds: dict[str, Callable[[Fields], EngineEvent | None]] = {
            "BlockStored": self._stored,
            "BlockRemoved": self._removed,
            "AllBlocksCleared": _cleared,
        }
        self._elements = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": ()}

    def decode(self, payload: bytes) -> Iterator[list[EngineEvent]]:
        """Decode the payload of one message, a part at a time: others may have their turn between two parts.

        Raises:
            ProtocolError: it is no batch of events, from here on. Other messages are not affected.
        """
        batch = items(payload, "batch", _BATCH)
        if len(batch) < 2:
            raise refused("batch", payload, _BATCH)
        part: list[EngineEvent] = []
        taken = num_bytes = 0
        for raw in items(batch[1], "batch", _BATCH, EVENTS_MAX):
            if (event := self._event(raw)) is not None:
                part.append(event)
            taken, num_bytes = taken + 1, num_bytes + len(raw)
            if taken >= _EVENTS_AT_ONCE or num_bytes >= _BYTES_AT_ONCE:
                yield part
                part, taken, num_bytes = [], 0, 0
        yield part

    def _event(self, raw: Raw) -> EngineEvent | None:
        told = event_fields(raw)
        elements: list[Raw] = []
        if isinstance(told, list):
            elements, told = told[1:], {"type": told[0]} if told else {}
        kind = text(told, "type")
        if kind is None:
            raise refused("event type", raw, "a string")
        make = self._kinds.get(kind)
        if make is None:
            self._omissions[Omission.UNKNOWN_TYPE] += 1
            return None
        names = self._elements[kind]
        unknown = max(len(elements) - len(names), 0) or self._unknown(tuple(told), names)
        if unknown:
            self._omissions[Omission.UNKNOWN_FIELD] += unknown
        return make(told | dict(zip(names, elements, strict=False)) if elements else told)

    def _unknown(self, shape: tuple[str, ...], names: tuple[str, ...]) -> int:
        """Count the names of a map's fields that this version does not know."""
        if shape in self._shapes:
            return 0
        unknown = sum(name not in names and name not in _ONLY_IN_MAPS for name in shape)
        if not unknown:
            if len(self._shapes) >= _SHAPES_MAX:
                self._shapes.clear()
            self._shapes.add(shape)
        return unknown

    def _stored(self, event: Fields) -> EngineEvent | None:
        hashes = _hashes(event)
        group = self._group_of(event)
        if group is not None and group not in self._needed:
            self._omissions[Omission.GROUP] += len(hashes)
            return None
        tier = self._tier(event, len(hashes))
        if tier is None:
            return None
        if group is not None:
            return EngineStored(hashes, tier=tier, group=group, needed_blocks=self._needed[group])
        token_ids = _token_ids(event)
        return (
            self._described(event, hashes, token_ids, tier) if token_ids else EngineStored(hashes, tier=tier)
        )

    def _described(
        self, event: Fields, hashes: list[EngineHash], token_ids: PackedTokens, tier: Tier
    ) -> EngineEvent | None:
        """Make an event whose tokens are told."""
        size = self._block_size
        parent = None if (told := block_hash(event, "parent_block_hash")) is None else _hash(told)
        lora, salt = text(event, "lora_name"), text(event, "cache_salt")
        omission = None
        usable = len(hashes)
        media: tuple[tuple[int, bytes], ...] = ()
        if (engine_size := integer(event, "block_size")) != size:
            self._complain(engine_size)
            omission, usable = Omission.BLOCK_SIZE, 0
        elif len(token_ids) != _TOKEN_BYTES * size * usable:
            omission, usable = Omission.PARTIAL, 0
        elif lora is None and not is_null(event, "lora_id"):  # an adapter without a name
            omission, usable = Omission.CONTENT, 0
        else:
            usable, untagged, media = _keys(event, lora, usable, size, is_root=parent is None)
            omission, salt = Omission.CONTENT, salt if untagged is None else untagged
        if usable < len(hashes) and omission:
            self._omissions[omission] += len(hashes) - usable
            hashes, token_ids = hashes[:usable], PackedTokens(token_ids[: _TOKEN_BYTES * size * usable])
        return EngineStored(hashes, parent, token_ids, size, tier, lora, salt, media) if hashes else None

    def _complain(self, size: int | None) -> None:
        if size is None:
            raise refused("block_size", size, "an integer")
        if size in self._other_sizes or len(self._other_sizes) >= _COMPLAINTS_MAX:
            return
        self._other_sizes.add(size)
        _log.warning(
            "kv_events_of_other_block_size",
            engine=size,
            model=self._block_size,
            fix="start the engine and Penstock with one block size (SGLang's is --page-size)",
        )

    def _removed(self, event: Fields) -> EngineEvent | None:
        hashes = _hashes(event)
        told = integer(event, "group_idx")
        is_first = told is None or (told not in self._needed and told == (self._group or 0))
        if not is_first and told not in self._needed:
            self._omissions[Omission.GROUP] += len(hashes)
            return None
        tier = self._tier(event, len(hashes))
        return None if tier is None else EngineRemoved(hashes, tier, None if is_first else told)

    def _group_of(self, event: Fields) -> int | None:
        """Find the group of stored blocks, and note what it needs; None: the first one. One that is not noted does not count."""
        group = integer(event, "group_idx")
        kind = text(event, "kv_cache_spec_kind")
        if kind is None:
            return group or None
        if kind in _WHOLE_CONTEXT and self._group is None:
            self._group = group
        if kind in _WHOLE_CONTEXT and group == self._group:
            return None
        number = -1 if group is None else group
        is_known = number in self._needed or len(self._needed) >= _GROUPS_MAX or number < 0
        if is_known or integer(event, "block_size") != self._block_size:
            return number
        if kind in _WHOLE_CONTEXT:
            self._needed[number] = None
        elif kind in _WINDOWS and (window := integer(event, "kv_cache_spec_sliding_window") or 0) > 0:
            self._needed[number] = -(-(window - 1) // self._block_size)
        return number

    def _tier(self, event: Fields, num_blocks: int) -> Tier | None:
        if text(event, "locality") == "REMOTE":
            return Tier.OBJECT
        medium = text(event, "medium")
        if medium is None:
            return Tier.DEVICE
        tier = _MEDIA.get(medium) or _MEDIA.get(medium.upper())
        if tier is None:
            self._omissions[Omission.MEDIUM] += num_blocks
        return tier


def _cleared(_event: Fields) -> EngineEvent:
    return EngineCleared()


def _hashes(event: Fields) -> list[EngineHash]:
    values = block_hashes(event, "block_hashes")
    return [value if type(value) is int and value >= 0 else _hash(value) for value in values]


def _hash(value: EngineHash) -> EngineHash:
    if isinstance(value, int):
        return unsigned(value)
    if 0 < len(value) <= _HASH_BYTES_MAX:
        return value
    raise refused("block hash", value, f"1 to {_HASH_BYTES_MAX} bytes")


def _token_ids(event: Fields) -> PackedTokens:
    values = integers(event, "token_ids")
    try:
        return PackedTokens(struct.pack(f"<{len(values)}i", *values)) if values else NO_TOKENS
    except struct.error:
        raise refused("token_ids", values, "32-bit integers") from None


def _keys(
    event: Fields, lora: str | None, num_blocks: int, block_size: int, *, is_root: bool
) -> tuple[int, str | None, tuple[tuple[int, bytes], ...]]:
    """Read what vLLM hashed besides tokens: one array of untagged keys per block, or null.

    Keys are the adapter's name, a pair of identifier and offset for each image or the like in the block, and in a prompt's first
    block the cache salt.

    Returns:
        how many leading blocks contain only tokens and media, the first block's cache salt, and the media that begin in them.
    """
    salt = None
    media: list[tuple[int, bytes]] = []
    for index, raw in enumerate(arrays(event, "extra_keys")[:num_blocks]):
        if is_nil(raw):
            continue
        keys = items(raw, "extra_keys", "arrays", VALUES_MAX)
        if keys and lora is not None and as_text(keys[0]) == lora:
            keys = keys[1:]
        begun = []
        while keys and (item := as_pair(keys[0])) is not None:
            identifier, offset = item
            if offset >= block_size:
                raise refused("extra_keys", keys[0], f"an offset below {block_size}, the size of a block")
            if offset >= 0:  # else it began in an earlier block, whose hash this one's continues
                begun.append((index * block_size + offset, _digest(identifier)))
            keys = keys[1:]
        if keys:
            name = as_text(keys[0])
            if index or not is_root or len(keys) > 1 or name is None:
                return index, salt, tuple(media)
            salt = name
        media += sorted(begun)
    return num_blocks, salt, tuple(media)


def _digest(identifier: str) -> bytes:
    """Give the digest that an identifier spells, which is how requests from here name their media; others only must differ."""
    try:
        return bytes.fromhex(identifier)
    except ValueError:
        return identifier.encode()
