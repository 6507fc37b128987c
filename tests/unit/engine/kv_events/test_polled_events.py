"""TensorRT-LLM's events become those of the other engines."""

from collections import Counter
from typing import Any

import pytest

from penstock.core.types.events import Tier
from penstock.core.wire import pack_tokens
from penstock.engine.kv_events.engine_events import (
    EngineCleared,
    EngineEvent,
    EngineRemoved,
    EngineStored,
    Omission,
    Omissions,
)
from penstock.engine.kv_events.polled import PolledEvents

SIZE = 4
WINDOW = 4096


class Harness:
    def __init__(self, rank: int | None = None) -> None:
        self.omissions: Omissions = Counter()
        self.events = PolledEvents(SIZE, self.omissions, rank)
        self.number = 0

    def read(self, *data: Any, **fields: Any) -> list[EngineEvent]:
        events = []
        for each in data:
            events.append({"event_id": self.number, "window_size": WINDOW, "data": each} | fields)
            self.number += 1
        return self.events.read(events)


def block(name: int | str, tokens: list[int], **fields: Any) -> dict[str, Any]:
    ids = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {
        "type": "stored_block",
        "block_hash": name,
        "tokens": ids,
        "cache_level": 0,
        "priority": 35,
    } | fields


def stored(*blocks: dict[str, Any], parent: int | None = None) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def told(
    name: int | bytes, parent: int | bytes | None, tokens: list[int], tier: Tier = Tier.DEVICE
) -> EngineStored:
    return EngineStored([name], parent, pack_tokens(tokens), SIZE, tier)


CREATED = {"type": "created", "num_blocks_per_cache_level": [100, 50]}
TWO = stored(block(-1, [1, 2, 3, 4]), block(2, [5, 6, 7, 8]))


def test_blocks_are_stored_and_removed() -> None:
    harness = Harness()
    assert harness.read(CREATED, TWO) == [
        told(2**64 - 1, None, [1, 2, 3, 4]),
        told(2, 2**64 - 1, [5, 6, 7, 8]),
    ]
    assert harness.read(stored(block(3, [9] * 4), parent=2)) == [told(3, 2, [9] * 4)]
    assert harness.read({"type": "removed", "block_hashes": [3, -1]}) == [
        EngineRemoved([3]), EngineRemoved([2**64 - 1])
    ]  # fmt: skip
    assert not harness.omissions


def test_blocks_move_between_tiers() -> None:
    harness = Harness()
    harness.read(TWO)
    level = {"type": "event_diff", "old_value": 0, "new_value": 1}
    assert harness.read({"type": "updated", "block_hash": 2, "cache_level": level, "priority": None}) == [
        EngineStored([2], tier=Tier.HOST), EngineRemoved([2])
    ]  # fmt: skip
    assert harness.read({"type": "updated", "block_hash": 2, "cache_level": None, "priority": level}) == []
    assert harness.read({"type": "removed", "block_hashes": [2]}) == [EngineRemoved([2], Tier.HOST)]


def test_missing_numbers_clear() -> None:
    harness = Harness()
    harness.read(TWO)
    harness.number += 3
    assert harness.read({"type": "removed", "block_hashes": [2]}) == [EngineCleared()]
    harness.number = 0
    assert harness.read(TWO)[0] == EngineCleared()
    assert harness.omissions == {Omission.LOST: 1, Omission.UNKNOWN_BLOCK: 1, Omission.RESTART: 1}


def test_only_one_rank_and_the_largest_window_count() -> None:
    harness = Harness(rank=1)
    assert harness.read(TWO, attention_dp_rank=0) == []
    assert len(harness.read(TWO, attention_dp_rank=1)) == 2
    assert harness.read(TWO, attention_dp_rank=1, window_size=128) == []
    assert harness.omissions == {Omission.GROUP: 1}
    assert harness.read(TWO, attention_dp_rank=1, window_size=8192)[0] == EngineCleared()


@pytest.mark.parametrize(
    "event",
    [{}, {"event_id": "x"}, {"event_id": 0}, {"event_id": 0, "data": 5}, {"event_id": 0, "data": {}}, None,
     {"event_id": 0, "data": {"type": "stored"}}, {"event_id": 0, "data": stored(block(1, [2**40] * 4))},
     {"event_id": 0, "data": stored(block("xyz", [1] * 4))}, {"event_id": 0, "data": stored(block(1, [1] * 4, cache_level=7))},
     {"event_id": 0, "window_size": "x", "data": TWO}],
)  # fmt: skip
def test_malformed_events_clear(event: Any) -> None:
    harness = Harness()
    harness.read(TWO)
    assert EngineCleared() in harness.events.read([event])
    assert harness.omissions[Omission.MALFORMED] == 1
