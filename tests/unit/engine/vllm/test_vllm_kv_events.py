"""KV events in the messages of vLLM's steps, without vLLM."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from penstock.core.errors import ConfigError
from penstock.core.hashing import block_hashes
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from penstock.core.wire import pack_hashes
from penstock.engine.kv_events.events import Omission
from penstock.engine.spec import EngineSpec
from penstock.engine.vllm.events import KV_EVENTS, VllmKvEvents, events_arguments
from penstock.engine.vllm.launch import tell_events

KEY = bytes(range(16))
BLOCK = 4


def events_of(**fields: Any) -> VllmKvEvents:
    return VllmKvEvents(EngineSpec(model="m", block_size=BLOCK, hash_key=KEY, **fields))


def stored(*names: int, tokens: list[int], parent: int | None = None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(names),
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "medium": "GPU",
    }


def batch(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def test_a_steps_events_are_those_of_the_prompts_that_routers_hash() -> None:
    events, ids = events_of(), list(range(3 * BLOCK))
    hashes = block_hashes(ids, BLOCK, key=KEY)[:, 0].tolist()
    events.read(0, {KV_EVENTS: [batch(stored(70, 71, tokens=ids[: 2 * BLOCK]))], "tiers": b""})
    events.read(0, None)
    events.read(0, {"NixlConnector": {}})
    removed = {"type": "BlockRemoved", "block_hashes": [70], "medium": "GPU"}
    events.read(0, {KV_EVENTS: [batch(stored(72, tokens=ids[2 * BLOCK :], parent=71)), batch(removed)]})
    ((rank, told),) = events.take()
    assert rank == 0
    assert [type(event) for event in told] == [BlockStored, BlockStored, BlockRemoved]
    first, second, gone = told
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert isinstance(gone, BlockRemoved)
    assert (first.block_hashes, first.parent_block_hash) == (pack_hashes(hashes[:2]), None)
    assert (second.block_hashes, second.parent_block_hash) == (pack_hashes(hashes[2:]), hashes[1])
    assert (gone.block_hashes, gone.tier) == (pack_hashes(hashes[:1]), Tier.DEVICE)
    assert events.readers[0].num_blocks == 2
    assert events.take() == ()


def test_a_batch_that_cannot_be_read_clears_what_was_known() -> None:
    events = events_of()
    events.read(0, {KV_EVENTS: [batch(stored(9, tokens=list(range(BLOCK))))]})
    events.take()
    with capture_logs() as logs:
        events.read(0, {KV_EVENTS: [b"\xc1"]})
    assert events.take() == ((0, [AllBlocksCleared()]),)
    assert [entry["event"] for entry in logs] == ["kv_event_message_malformed"]
    assert events.readers[0].omissions == {Omission.MALFORMED: 1}


@pytest.mark.parametrize("is_async", [False, True])
def test_the_scheduler_is_of_the_kind_that_vllm_chose(is_async: bool) -> None:
    scheduling = SimpleNamespace(async_scheduling=is_async, scheduler_cls=None)
    tell_events(SimpleNamespace(kv_events_config=None, scheduler_config=scheduling))
    assert scheduling.scheduler_cls is None
    tell_events(SimpleNamespace(kv_events_config=object(), scheduler_config=scheduling))
    name = "TellingAsyncScheduler" if is_async else "TellingScheduler"
    assert scheduling.scheduler_cls == f"penstock.engine.vllm.scheduler.{name}"


def test_another_scheduler_is_refused_where_kv_events_are_told() -> None:
    args: dict[str, Any] = {"scheduler_cls": "mine.Scheduler"}
    with pytest.raises(ConfigError, match="engine_args: scheduler_cls: Penstock's own scheduler"):
        events_arguments(EngineSpec(model="m", block_size=BLOCK, args=args))
    args["enable_prefix_caching"] = False
    assert events_arguments(EngineSpec(model="m", block_size=BLOCK, args=args)) == {}
