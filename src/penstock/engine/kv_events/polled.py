"""Reads KV events that TensorRT-LLM's API returns: dicts with a number each, for all data-parallel ranks and attention windows.

The form is that of `LLM.get_kv_cache_events`: `{event_id, attention_dp_rank, window_size, data: {type, ...}}`. Events tell neither
adapters nor salts, so an engine that is followed must compute all prompts alike.
"""

import struct
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.core.types.events import Tier
from penstock.core.wire import PackedTokens, pack_tokens
from penstock.engine.kv_events.engine_events import (
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
    Omission,
    Omissions,
    unsigned,
)

_LEVELS = (Tier.DEVICE, Tier.HOST)


class PolledEvents:
    """Reads the events of one data-parallel rank.

    After a gap in the numbers all blocks are cleared. Of several attention windows only the largest counts. A block is in one
    tier at a time, and has one copy.
    """

    def __init__(self, block_size: int, omissions: Omissions, rank: int | None = None) -> None:
        """Make a reader.

        Args:
            block_size: tokens in a block; smaller blocks are partial and left out.
            omissions: counts what is left out.
            rank: its events alone are read; None: there is one rank.
        """
        self._block_size = block_size
        self._omissions = omissions
        self._rank = rank
        self._window = 0
        self._next: int | None = None
        self._held: dict[EngineHash, Tier] = {}

    def read(self, events: Iterable[Mapping[str, Any]]) -> list[EngineEvent]:
        """Read events in the order of their numbers. A malformed one clears all blocks, since it may have been a removal."""
        out: list[EngineEvent] = []
        for event in events:
            try:
                self._read(event, out)
            except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, struct.error):
                self._omissions[Omission.MALFORMED] += 1
                self._clear(out)
        return out

    def _read(self, event: Mapping[str, Any], out: list[EngineEvent]) -> None:
        rank = event.get("attention_dp_rank")
        if self._rank is not None and rank is not None and rank != self._rank:
            return
        number = int(event["event_id"])
        if self._next is not None and number != self._next:
            self._omissions[Omission.LOST if number > self._next else Omission.RESTART] += 1
            self._clear(out)
        self._next = number + 1
        data, window = event["data"], event.get("window_size") or self._window
        if window > self._window:
            if self._held:  # of a smaller window
                self._clear(out)
            self._window = window
        match data["type"]:
            case _ if window != self._window:
                self._omissions[Omission.GROUP] += 1
            case "stored":
                self._store(data, out)
            case "removed":
                self._remove([_hash(value) for value in data["block_hashes"]], out)
            case "updated":
                self._update(data, out)
            case "created":
                pass
            case _:
                self._omissions[Omission.UNKNOWN_TYPE] += 1

    def _store(self, data: Mapping[str, Any], out: list[EngineEvent]) -> None:
        parent = None if data.get("parent_hash") is None else _hash(data["parent_hash"])
        blocks = data["blocks"]
        for index, block in enumerate(blocks):
            tokens = block["tokens"]
            if len(tokens) != self._block_size:
                self._omissions[Omission.PARTIAL] += len(blocks) - index
                return
            if block.get("mm_keys") or any(token.get("token_extra_id") for token in tokens):
                self._omissions[Omission.CONTENT] += len(blocks) - index
                return
            name, tier = _hash(block["block_hash"]), _LEVELS[block.get("cache_level") or 0]
            if self._held.get(name) is not tier:
                packed = PackedTokens(pack_tokens([int(token["token_id"]) for token in tokens]))
                self._remove([name] if name in self._held else [], out)
                self._held[name] = tier
                out.append(EngineStored([name], parent, packed, self._block_size, tier))
            parent = name

    def _remove(self, names: list[EngineHash], out: list[EngineEvent]) -> None:
        for name in names:
            tier = self._held.pop(name, None)
            if tier is None:
                self._omissions[Omission.UNKNOWN_BLOCK] += 1
            else:
                out.append(EngineRemoved([name], tier))

    def _update(self, data: Mapping[str, Any], out: list[EngineEvent]) -> None:
        name, level = _hash(data["block_hash"]), data.get("cache_level")
        if level is None:  # only its priority changed
            return
        if name not in self._held:
            self._omissions[Omission.UNKNOWN_BLOCK] += 1
            return
        tier, before = _LEVELS[level["new_value"]], self._held[name]
        if tier is not before:
            self._held[name] = tier
            out += [EngineStored([name], tier=tier), EngineRemoved([name], before)]

    def _clear(self, out: list[EngineEvent]) -> None:
        self._held.clear()
        out.append(EngineCleared())


def _hash(value: Any) -> EngineHash:
    """Give a block's name: TensorRT-LLM has integers, and in newer versions hexadecimal text."""
    return bytes.fromhex(value) if isinstance(value, str) else unsigned(int(value))
