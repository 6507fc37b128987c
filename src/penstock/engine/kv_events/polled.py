"""Reads the KV events that TensorRT-LLM gives on request: dicts with a number each, for all data-parallel ranks and attention windows.

The form is that of `LLM.get_kv_cache_events`, which `trtllm-serve` answers with at `POST /kv_cache_events`: `{event_id,
attention_dp_rank, window_size, data: {type, ...}}`. Events tell neither adapters nor salts, so an engine that is followed must
compute all prompts alike.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.hashing import DEFAULT_KEY
from penstock.core.log import get_logger
from penstock.core.types.events import Tier
from penstock.core.wire import PackedTokens, pack_tokens
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
from penstock.engine.kv_events.subscriber import Publish
from penstock.engine.kv_events.translator import KvEventTranslator, SaltOf

_LEVELS = (Tier.DEVICE, Tier.HOST)
_RANKS_MAX = 1024
_EMPTY_PAUSE_S = 0.05
_FAILED_PAUSE_S = 1.0
_log = get_logger()


class PolledKvEvents:
    """Asks a server for its KV events, and gives them to a function. One task owns it.

    The events of all data-parallel ranks count as those of one cache, since no request can be sent to a rank.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[bytes]],
        *,
        block_size: int,
        salt_of: SaltOf,
        publish: Publish,
        close: Callable[[], Awaitable[None]],
        hash_key: bytes = DEFAULT_KEY,
    ) -> None:
        """Make it; `run` asks.

        Args:
            ask: gives the JSON of the events since the last call, or raises PenstockError.
            block_size: tokens in a block.
            salt_of: finds a prompt's salt.
            publish: called with events in order, in the event loop of `run`.
            close: called as `run` ends.
            hash_key: the deployment's.
        """
        self.omissions: Omissions = Omissions()
        self._ask = ask
        self._close = close
        self._publish = publish
        self._block_size = block_size
        self._readers: dict[int, PolledEvents] = {}
        self._translator = KvEventTranslator(
            block_size=block_size, salt_of=salt_of, omissions=self.omissions, hash_key=hash_key
        )

    async def run(self) -> None:
        """Ask until cancelled. A failed question loses events; the gap in their numbers then clears all blocks."""
        try:
            while True:
                try:
                    polled = msgspec.json.decode(await self._ask(), type=list[Any])
                except (PenstockError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    _log.debug("kv_events_not_polled", reason=str(error))
                    await asyncio.sleep(_FAILED_PAUSE_S)
                    continue
                if events := self._translator.translate(self._read(polled)):
                    self._publish(events)
                await asyncio.sleep(0 if polled else _EMPTY_PAUSE_S)
        finally:
            await self._close()

    def _read(self, polled: Iterable[Any]) -> list[EngineEvent]:
        out: list[EngineEvent] = []
        for event in polled:
            rank = (event.get("attention_dp_rank") or 0) if isinstance(event, dict) else 0
            if not isinstance(rank, int) or not 0 <= rank < _RANKS_MAX:
                rank = 0
            self._readers.setdefault(rank, PolledEvents(self._block_size, self.omissions)).read(event, out)
        return out


class PolledEvents:
    """Reads the events of one data-parallel rank.

    After a gap in the numbers all blocks are cleared. Of several attention windows only the largest counts. A block is in one
    tier at a time, and has one copy.
    """

    def __init__(self, block_size: int, omissions: Omissions) -> None:
        """Make a reader.

        Args:
            block_size: tokens in a block; smaller blocks are partial and left out.
            omissions: counts what is left out.
        """
        self._block_size = block_size
        self._omissions = omissions
        self._window = 0
        self._next: int | None = None
        self._held: dict[EngineHash, Tier] = {}

    def read(self, event: Mapping[str, Any], out: list[EngineEvent]) -> None:
        """Read the next event into `out`. A malformed one clears all blocks, since it may have been a removal."""
        try:
            self._read(event, out)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, struct.error):
            self._omissions[Omission.MALFORMED] += 1
            self._clear(out)

    def _read(self, event: Mapping[str, Any], out: list[EngineEvent]) -> None:
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
