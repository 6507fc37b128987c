"""Decodes KV event messages of vLLM and SGLang: one msgpack array `[time, events, data-parallel rank]` per engine step.

An event is a map with its type under `type`, or in older versions an array that begins with it. Field names and the order of
array elements are those of vLLM's `vllm/distributed/kv_events.py` (0.32), which SGLang's maps share.
"""

import reprlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.core.errors import ProtocolError
from penstock.core.log import get_logger
from penstock.core.types.events import Tier
from penstock.core.wire import NO_TOKENS, PackedTokens
from penstock.engine.kv_events.engine_events import (
    EngineBatch,
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
    Omission,
    Omissions,
    unsigned,
)

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
_HASH_BYTES_MAX = 64
_SHAPES_MAX = 64
_TOKEN_BYTES = 4
_log = get_logger()


class EventDecoder:
    """Decodes one publisher's messages.

    Only one group of layers counts: the first one with attention over the whole context. It decides how much of a prompt the
    engine can use again; groups with sliding windows keep less, and their blocks have the same hashes.
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
        self._shapes: dict[tuple[str, ...], int] = {}  # names of a map's fields -> how many are unknown
        self._kinds: dict[str, Callable[[dict[str, Any]], EngineEvent | None]] = {
            "BlockStored": self._stored,
            "BlockRemoved": self._removed,
            "AllBlocksCleared": _cleared,
        }
        self._elements = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": ()}

    def decode(self, payload: bytes) -> EngineBatch:
        """Decode the payload of one message.

        Raises:
            ProtocolError: it is no batch of events. Other messages are not affected.
        """
        try:
            batch = msgspec.msgpack.decode(payload)
        except (
            msgspec.DecodeError,
            ValueError,
            TypeError,
            RecursionError,
            MemoryError,
            OverflowError,
        ) as error:
            raise ProtocolError(f"KV events: not msgpack ({error})") from None
        if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
            raise _refused("batch", batch, "[time, events, rank]")
        rank = batch[2] if len(batch) > 2 else None
        if rank is not None and type(rank) is not int:
            raise _refused("data-parallel rank", rank, "an integer")
        events = [event for raw in batch[1] if (event := self._event(raw)) is not None]
        return EngineBatch(events, rank)

    def _event(self, raw: Any) -> EngineEvent | None:
        if isinstance(raw, dict):
            kind = raw.get("type")
        elif isinstance(raw, list) and raw:
            kind = raw[0]
        else:
            raise _refused("event", raw, "a map or an array")
        if not isinstance(kind, str):
            raise _refused("event type", kind, "a string")
        make = self._kinds.get(kind)
        if make is None:
            self._omissions[Omission.UNKNOWN_TYPE] += 1
            return None
        names = self._elements[kind]
        if isinstance(raw, list):
            if len(raw) > len(names) + 1:
                self._omissions[Omission.UNKNOWN_FIELD] += len(raw) - 1 - len(names)
            return make(dict(zip(names, raw[1:], strict=False)))
        shape = tuple(raw)
        unknown = self._shapes.get(shape)
        if unknown is None:
            if len(self._shapes) >= _SHAPES_MAX:
                self._shapes.clear()
            unknown = self._shapes[shape] = sum(
                name not in names and name not in _ONLY_IN_MAPS for name in shape
            )
        if unknown:
            self._omissions[Omission.UNKNOWN_FIELD] += unknown
        return make(raw)

    def _stored(self, fields: dict[str, Any]) -> EngineEvent | None:
        hashes = _hashes(fields.get("block_hashes"))
        if not self._counts(fields.get("group_idx"), fields.get("kv_cache_spec_kind"), is_stored=True):
            self._omissions[Omission.GROUP] += len(hashes)
            return None
        tier = self._tier(fields.get("medium"), fields.get("locality"), len(hashes))
        if tier is None:
            return None
        if not fields.get("token_ids"):
            return EngineStored(hashes, tier=tier)
        return self._described(fields, hashes, tier)

    def _described(self, fields: dict[str, Any], hashes: list[EngineHash], tier: Tier) -> EngineEvent | None:
        """Make an event whose tokens are told."""
        get, size = fields.get, self._block_size
        token_ids = _token_ids(get("token_ids"))
        parent = None if get("parent_block_hash") is None else _hash(get("parent_block_hash"))
        lora, salt = _name("lora_name", get("lora_name")), _name("cache_salt", get("cache_salt"))
        omission = None
        usable = len(hashes)
        if get("block_size") != size:
            self._complain(get("block_size"))
            omission, usable = Omission.BLOCK_SIZE, 0
        elif len(token_ids) != _TOKEN_BYTES * size * usable:
            omission, usable = Omission.PARTIAL, 0
        elif lora is None and get("lora_id") is not None:  # an adapter without a name
            omission, usable = Omission.CONTENT, 0
        elif keys := get("extra_keys"):
            usable, untagged = _usable(keys, lora, usable, is_root=parent is None)
            omission, salt = Omission.CONTENT, salt if untagged is None else untagged
        if usable < len(hashes) and omission:
            self._omissions[omission] += len(hashes) - usable
            hashes, token_ids = hashes[:usable], PackedTokens(token_ids[: _TOKEN_BYTES * size * usable])
        return EngineStored(hashes, parent, token_ids, size, tier, lora, salt) if hashes else None

    def _complain(self, size: Any) -> None:
        if type(size) is not int:
            raise _refused("block_size", size, "an integer")
        _log.warning(
            "kv_events_of_other_block_size",
            engine=size,
            model=self._block_size,
            fix="start the engine and Penstock with one block size (SGLang's is --page-size)",
        )

    def _removed(self, fields: dict[str, Any]) -> EngineEvent | None:
        hashes = _hashes(fields.get("block_hashes"))
        if not self._counts(fields.get("group_idx"), None, is_stored=False):
            self._omissions[Omission.GROUP] += len(hashes)
            return None
        tier = self._tier(fields.get("medium"), fields.get("locality"), len(hashes))
        return None if tier is None else EngineRemoved(hashes, tier)

    def _counts(self, group: Any, kind: Any, *, is_stored: bool) -> bool:
        """Say whether blocks of this group of layers count."""
        if group is not None and type(group) is not int:
            raise _refused("group_idx", group, "an integer")
        if not is_stored:
            return group is None or group == (self._group or 0)
        if kind is None:
            return not group
        if _name("kv_cache_spec_kind", kind) not in _WHOLE_CONTEXT:
            return False
        if self._group is None:
            self._group = group
        return bool(group == self._group)

    def _tier(self, medium: Any, locality: Any, num_blocks: int) -> Tier | None:
        if locality == "REMOTE":
            return Tier.OBJECT
        if medium is None:
            return Tier.DEVICE
        if not isinstance(medium, str):
            raise _refused("medium", medium, "a string")
        tier = _MEDIA.get(medium) or _MEDIA.get(medium.upper())
        if tier is None:
            self._omissions[Omission.MEDIUM] += num_blocks
        return tier


def _cleared(_fields: dict[str, Any]) -> EngineEvent:
    return EngineCleared()


def _hashes(values: Any) -> list[EngineHash]:
    if not isinstance(values, list):
        raise _refused("block_hashes", values, "an array")
    return [value if type(value) is int and value >= 0 else _hash(value) for value in values]


def _hash(value: Any) -> EngineHash:
    if type(value) is int:
        return unsigned(value)
    if isinstance(value, bytes) and 0 < len(value) <= _HASH_BYTES_MAX:
        return value
    raise _refused("block hash", value, f"an integer, or up to {_HASH_BYTES_MAX} bytes")


def _token_ids(values: Any) -> PackedTokens:
    if not values:
        return NO_TOKENS
    if not isinstance(values, list):
        raise _refused("token_ids", values, "an array")
    try:
        return PackedTokens(struct.pack(f"<{len(values)}i", *values))
    except struct.error:
        raise _refused("token_ids", values, "32-bit integers") from None


def _name(what: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _refused(what, value, "a string")
    return value


def _usable(keys: Any, lora: str | None, num_blocks: int, *, is_root: bool) -> tuple[int, str | None]:
    """Read what vLLM hashed besides tokens: one array of untagged keys per block, or null.

    Returns:
        how many leading blocks contain only tokens, and the first block's cache salt.
    """
    if not isinstance(keys, list):
        raise _refused("extra_keys", keys, "an array")
    salt = None
    for index, of_block in enumerate(keys[:num_blocks]):
        rest: Sequence[Any] = of_block or ()
        if not isinstance(rest, list | tuple):
            raise _refused("extra_keys", of_block, "arrays")
        if lora is not None and rest and rest[0] == lora:
            rest = rest[1:]
        if not rest:
            continue
        if index or not is_root or len(rest) > 1 or not isinstance(rest[0], str):
            return index, salt
        salt = rest[0]
    return num_blocks, salt


def _refused(what: str, value: Any, expected: str) -> ProtocolError:
    return ProtocolError(f"KV events: {what}: expected {expected}, got {reprlib.repr(value)[:100]}")
