"""Messages of vLLM and SGLang in all their encodings become one form, and nothing else gets through."""

import random
import struct
from collections import Counter
from typing import Any

import msgspec
import pytest

from penstock.core.errors import ProtocolError
from penstock.core.types.events import Tier
from penstock.engine.kv_events.decoder import EventDecoder
from penstock.engine.kv_events.engine_events import (
    EngineCleared,
    EngineEvent,
    EngineRemoved,
    EngineStored,
    Omission,
    Omissions,
)

SIZE = 4
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]
PACKED = struct.pack("<8i", *TOKENS)


def stored(**changes: Any) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": TOKENS,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return event | changes


class Harness:
    def __init__(self) -> None:
        self.omissions: Omissions = Counter()
        self.decoder = EventDecoder(SIZE, self.omissions)

    def decode(self, *events: Any) -> list[EngineEvent]:
        return self.decoder.decode(msgspec.msgpack.encode([1.5, events, 0])).events


@pytest.fixture
def harness() -> Harness:
    return Harness()


EXPECTED = EngineStored([11, 12], None, PACKED, SIZE)


def test_a_map_of_vllm(harness: Harness) -> None:
    assert harness.decode(stored()) == [EXPECTED]
    assert not harness.omissions


def test_the_array_of_older_versions_says_the_same(harness: Harness) -> None:
    short = ["BlockStored", [11, 12], None, TOKENS, SIZE, None]
    for event in (short, [*short, "GPU"], [*short, "GPU", None, [None, None], 0]):
        assert harness.decode(event) == [EXPECTED]
    removed = harness.decode(["BlockRemoved", [11]], ["BlockRemoved", [12], "CPU"], ["AllBlocksCleared"])
    assert removed == [EngineRemoved([11]), EngineRemoved([12], Tier.HOST), EngineCleared()]
    assert not harness.omissions


def test_a_batch_has_its_rank_if_any() -> None:
    decoder = Harness().decoder
    assert decoder.decode(msgspec.msgpack.encode([1.5, [], 3])).rank == 3
    assert decoder.decode(msgspec.msgpack.encode([1.5, []])).rank is None
    assert decoder.decode(msgspec.msgpack.encode([1.5, [], None])).rank is None


def test_hashes_of_any_kind(harness: Harness) -> None:
    signed, raw = -(2**63), bytes(range(32))
    (event,) = harness.decode(stored(block_hashes=[signed, raw], parent_block_hash=-1))
    assert isinstance(event, EngineStored)
    assert event.hashes == [2**63, raw]
    assert event.parent == 2**64 - 1


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.DEVICE), ("GPU", Tier.DEVICE), ("CPU", Tier.HOST), ("cpu", Tier.HOST), ("CPU_PINNED", Tier.HOST),
        ("DISK", Tier.DISK), ("STORAGE", Tier.DISK), ("EXTERNAL", Tier.OBJECT),
    ],
)  # fmt: skip
def test_media_are_tiers(harness: Harness, medium: str | None, tier: Tier) -> None:
    (event, gone) = harness.decode(
        stored(medium=medium), {"type": "BlockRemoved", "block_hashes": [11], "medium": medium}
    )
    assert isinstance(event, EngineStored)
    assert event.tier is tier
    assert gone == EngineRemoved([11], tier)


def test_blocks_in_a_remote_store_are_in_the_object_tier(harness: Harness) -> None:
    (event,) = harness.decode(stored(medium="CPU", locality="REMOTE"))
    assert isinstance(event, EngineStored)
    assert event.tier is Tier.OBJECT


def test_blocks_may_be_named_without_tokens(harness: Harness) -> None:
    assert harness.decode(stored(token_ids=[], block_size=0, medium="CPU")) == [
        EngineStored([11, 12], tier=Tier.HOST)
    ]


def test_the_first_block_of_a_prompt_has_the_salt(harness: Harness) -> None:
    events = harness.decode(
        stored(extra_keys=[["ab12"], None]),
        stored(extra_keys=[["lora", "ab12"], ["lora"]], lora_id=1, lora_name="lora"),
        stored(extra_keys=[["lora"], ["lora"]], lora_id=1, lora_name="lora"),
        stored(extra_keys=None, cache_salt="ab12"),
    )
    names = [(event.lora_name, event.cache_salt) for event in events if isinstance(event, EngineStored)]
    assert names == [(None, "ab12"), ("lora", "ab12"), ("lora", None), (None, "ab12")]
    assert not harness.omissions


def test_blocks_from_the_first_image_on_are_left_out(harness: Harness) -> None:
    (event,) = harness.decode(stored(extra_keys=[["ab12"], [["image", 3]]]))
    assert event == EngineStored([11], None, PACKED[:16], SIZE, cache_salt="ab12")
    assert harness.decode(stored(extra_keys=[[["image", 0]], None])) == []
    assert harness.decode(stored(extra_keys=[[b"embeddings"], None])) == []
    assert harness.decode(stored(extra_keys=[["ab12"], None], parent_block_hash=7)) == []
    assert harness.decode(stored(lora_id=1, extra_keys=None)) == []
    assert harness.omissions == {Omission.CONTENT: 9}


def test_other_types_and_fields_are_counted(harness: Harness) -> None:
    assert harness.decode({"type": "BlockUpdated", "x": 1}, ["Other", 1], stored(later=1, also=2)) == [
        EXPECTED
    ]
    assert harness.decode([*["AllBlocksCleared"], 1]) == [EngineCleared()]
    assert harness.omissions == {Omission.UNKNOWN_TYPE: 2, Omission.UNKNOWN_FIELD: 3}


def test_only_one_group_of_layers_counts(harness: Harness) -> None:
    """A hybrid model: sliding windows first, then two groups with the whole context."""
    window = stored(group_idx=0, kv_cache_spec_kind="sliding_window", token_ids=TOKENS[:7])
    assert harness.decode(window, stored(group_idx=1), stored(group_idx=2)) == [EXPECTED]
    gone = [
        {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": group}
        for group in (0, 1, 2)
    ]
    assert harness.decode(*gone) == [EngineRemoved([11])]
    assert harness.omissions == {Omission.GROUP: 6}


def test_other_sizes_and_media_are_left_out(harness: Harness) -> None:
    assert harness.decode(stored(block_size=8), stored(token_ids=TOKENS[:5]), stored(medium="TAPE")) == []
    assert harness.omissions == {Omission.BLOCK_SIZE: 2, Omission.PARTIAL: 2, Omission.MEDIUM: 2}


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (5, "event"),
        ([], "event"),
        ({}, "event type"),
        ([["BlockStored"]], "event type"),
        (stored(block_hashes=7), "block_hashes"),
        (stored(block_hashes=["x", "y"]), "block hash"),
        (stored(block_hashes=[True, 1]), "block hash"),
        (stored(block_hashes=[bytes(65), 1]), "block hash"),
        (stored(parent_block_hash=1.5), "block hash"),
        (stored(token_ids=[1.5] * 8), "token_ids"),
        (stored(token_ids=[2**31] * 8), "token_ids"),
        (stored(token_ids={"a": 1}), "token_ids"),
        (stored(block_size="4"), "block_size"),
        (stored(medium=4), "medium"),
        (stored(group_idx="0"), "group_idx"),
        (stored(kv_cache_spec_kind=["full_attention"]), "kv_cache_spec_kind"),
        (stored(lora_name=4), "lora_name"),
        (stored(extra_keys=4), "extra_keys"),
        (stored(extra_keys=[4, None]), "extra_keys"),
        (["BlockRemoved"], "block_hashes"),
    ],
)
def test_malformed_events_are_refused(harness: Harness, event: Any, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        harness.decode(event)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x93", b"\x90", b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000, b"\xa2\xff\xff", b"\x80",
     msgspec.msgpack.encode([0.0, 5, 0]), msgspec.msgpack.encode([0.0, [], "0"])],
)  # fmt: skip
def test_malformed_messages_are_refused(harness: Harness, payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="KV events"):
        harness.decoder.decode(payload)


def test_an_error_quotes_little_of_a_long_value(harness: Harness) -> None:
    with pytest.raises(ProtocolError) as caught:
        harness.decode(stored(token_ids=["x" * 1000] * 1000))
    assert len(caught.value.message) < 200


def test_mutated_messages_raise_nothing_else(harness: Harness) -> None:
    rng = random.Random(11)
    seeds = [
        msgspec.msgpack.encode([1.5, [stored(extra_keys=[["ab", ["x", 2]], None]), ["AllBlocksCleared"]], 0]),
        msgspec.msgpack.encode([1.5, [["BlockStored", [b"x" * 32, -4], 5, TOKENS, SIZE, None, "CPU"]]]),
        msgspec.msgpack.encode([1.5, [{"type": "BlockRemoved", "block_hashes": [5], "medium": None}], 0]),
    ]
    refused = 0
    for _ in range(10_000):
        message = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(message))
            match rng.randrange(4):
                case 0:
                    message[at] = rng.randrange(256)
                case 1:
                    del message[at : at + rng.randrange(1, 9)]
                case 2:
                    message[at:at] = rng.randbytes(rng.randrange(1, 9))
                case _:
                    message[at] ^= 1 << rng.randrange(8)
            if not message:
                break
        try:
            harness.decoder.decode(bytes(message))
        except ProtocolError:
            refused += 1
    assert 5_000 < refused < 10_000
