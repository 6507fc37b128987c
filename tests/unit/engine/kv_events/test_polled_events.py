"""TensorRT-LLM's events become those of the other engines."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.core.types.events import Tier
from penstock.core.wire import pack_tokens
from penstock.engine.kv_events.events import (
    EngineCleared,
    EngineEvent,
    EngineRemoved,
    EngineStored,
    Omission,
    Omissions,
)
from penstock.engine.kv_events.polled import PolledEvents, PolledKvEvents
from penstock.engine.kv_events.translator import HexSalts

SIZE = 4
WINDOW = 4096


class Harness:
    def __init__(self) -> None:
        self.omissions: Omissions = Counter()
        self.events = PolledEvents(SIZE, self.omissions)
        self.number = 0

    def read(self, *data: Any, **fields: Any) -> list[EngineEvent]:
        out: list[EngineEvent] = []
        for each in data:
            self.events.read({"event_id": self.number, "window_size": WINDOW, "data": each} | fields, out)
            self.number += 1
        return out


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


def test_missing_numbers_clear() -> None:
    harness = Harness()
    harness.read(TWO)
    harness.number += 3
    assert harness.read({"type": "removed", "block_hashes": [2]}) == [EngineCleared()]
    harness.number = 0
    assert harness.read(TWO)[0] == EngineCleared()
    assert harness.omissions == {Omission.LOST: 1, Omission.UNKNOWN_BLOCK: 1, Omission.RESTART: 1}


def test_only_the_largest_window_counts() -> None:
    harness = Harness()
    assert len(harness.read(TWO)) == 2
    assert harness.read(TWO, window_size=128) == []
    assert harness.omissions == {Omission.GROUP: 1}
    assert harness.read(TWO, window_size=8192)[0] == EngineCleared()


async def test_all_ranks_of_a_server_count_as_one_cache_and_a_failed_question_loses_events() -> None:
    """Each rank numbers its events from 0; a block that two ranks have is stored once, and removed with the last one."""
    stored_by = [
        {"event_id": 0, "attention_dp_rank": rank, "window_size": WINDOW, "data": TWO} for rank in (0, 1)
    ]
    removed_by = [
        {"event_id": 1, "attention_dp_rank": rank, "window_size": WINDOW, "data": {"type": "removed", "block_hashes": [2]}}
        for rank in (0, 1)
    ]  # fmt: skip
    late = {"event_id": 3, "attention_dp_rank": 1, "window_size": WINDOW, "data": TWO}
    answers = [stored_by, removed_by[:1], removed_by[1:], [late]]
    told_of: list[list[Any]] = []
    closed: list[bool] = []

    async def ask() -> bytes:
        if not answers:
            raise asyncio.CancelledError
        return json.dumps(answers.pop(0)).encode()

    async def close() -> None:
        closed.append(True)

    source = PolledKvEvents(
        ask, block_size=SIZE, salt_of=HexSalts(), publish=lambda events: told_of.append(list(events)), close=close
    )  # fmt: skip
    with pytest.raises(asyncio.CancelledError):
        await source.run()
    kinds = [[type(event).__name__ for event in events] for events in told_of]
    assert kinds == [
        ["BlockStored", "BlockStored"],
        ["BlockRemoved"],
        ["AllBlocksCleared", "BlockStored", "BlockStored"],
    ]
    assert (source.omissions[Omission.LOST], closed) == (1, [True])


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
    out: list[EngineEvent] = []
    harness.events.read(event, out)
    assert EngineCleared() in out
    assert harness.omissions[Omission.MALFORMED] == 1


def test_events_with_exactly_the_names_of_the_packages_sources_are_understood() -> None:
    recorded = json.loads((Path(__file__).parents[3] / "data" / "trtllm" / "recorded.json").read_text())[
        "kv_events"
    ]
    values: dict[str, Any] = {
        "num_blocks_per_cache_level": [4, 0], "parent_hash": None, "block_hash": 7, "cache_level": 0, "priority": 35,
        "token_extra_id": 0, "block_hashes": [7],
    }  # fmt: skip

    def made(kind: str, **fields: Any) -> dict[str, Any]:
        given = {"type": kind} | values | fields
        return {name: given[name] for name in recorded[kind]}

    tokens = [made("unique_token", token_id=number) for number in range(SIZE)]
    blocks = [made("stored_block", tokens=tokens)]
    diff = made("event_diff", new_value=1, old_value=0)
    data = (
        made("created"),
        made("stored", blocks=blocks),
        made("updated", cache_level=diff),
        made("removed"),
    )
    harness = Harness()
    events: list[EngineEvent] = []
    for numbered in enumerate(data):
        harness.events.read(dict(zip(recorded["event"], numbered, strict=True)), events)
    assert events == [
        told(7, None, [0, 1, 2, 3]), EngineStored([7], tier=Tier.HOST), EngineRemoved([7]), EngineRemoved([7], Tier.HOST),
    ]  # fmt: skip
    assert not harness.omissions
