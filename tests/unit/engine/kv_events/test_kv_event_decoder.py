"""Messages of vLLM and SGLang in all their encodings become one form, and nothing else gets through."""

import gc
import random
import struct
from collections import Counter
from typing import Any

import msgspec
import pytest

from penstock.core.errors import ProtocolError
from penstock.core.types.events import Tier
from penstock.engine.kv_events.decoder import EVENTS_MAX, VALUES_MAX, EventDecoder
from penstock.engine.kv_events.events import (
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
        return self.message(msgspec.msgpack.encode([1.5, events, 0]))

    def message(self, payload: bytes) -> list[EngineEvent]:
        return [event for part in self.decoder.decode(payload) for event in part]


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


def test_hashes_of_any_kind(harness: Harness) -> None:
    signed, raw = -(2**63), bytes(range(32))
    (event,) = harness.decode(stored(block_hashes=[signed, raw], parent_block_hash=-1))
    assert isinstance(event, EngineStored)
    assert event.hashes == [2**63, raw]
    assert event.parent == 2**64 - 1


@pytest.mark.parametrize(
    ("medium", "locality", "tier"),
    [
        (None, None, Tier.DEVICE), ("GPU", None, Tier.DEVICE), ("cpu", None, Tier.HOST), ("CPU_PINNED", None, Tier.HOST),
        ("DISK", None, Tier.DISK), ("STORAGE", None, Tier.DISK), ("EXTERNAL", None, Tier.OBJECT), ("CPU", "REMOTE", Tier.OBJECT),
    ],
)  # fmt: skip
def test_media_are_tiers(harness: Harness, medium: str | None, locality: str | None, tier: Tier) -> None:
    where = {"medium": medium} | ({"locality": locality} if locality else {})
    (event, gone) = harness.decode(stored(**where), {"type": "BlockRemoved", "block_hashes": [11], **where})
    assert isinstance(event, EngineStored)
    assert event.tier is tier
    assert gone == EngineRemoved([11], tier)


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


def test_images_are_named_where_they_begin(harness: Harness) -> None:
    """An identifier of hexadecimal digits spells a digest; a block within an image tells a negative offset."""
    events = harness.decode(
        stored(extra_keys=[[["cd34", 1], "ab12"], [["cd34", -3], ["image", 3]]]),
        stored(extra_keys=[["lora", ["ef", 0], ["cd", 2], "ab12"], ["lora"]], lora_id=1, lora_name="lora"),
        stored(extra_keys=[[["cd34", -70]], None], parent_block_hash=7),
    )
    told = [(event.cache_salt, event.media) for event in events if isinstance(event, EngineStored)]
    assert told == [
        ("ab12", ((1, b"\xcd\x34"), (SIZE + 3, b"image"))),
        ("ab12", ((0, b"\xef"), (2, b"\xcd"))),
        (None, ()),
    ]
    assert not harness.omissions


def test_blocks_from_the_first_embeddings_on_are_left_out(harness: Harness) -> None:
    (event,) = harness.decode(stored(extra_keys=[["ab12"], [["image", 3, 4]]]))
    assert event == EngineStored([11], None, PACKED[:16], SIZE, cache_salt="ab12")
    assert harness.decode(stored(extra_keys=[[b"embeddings"], None])) == []
    assert harness.decode(stored(extra_keys=[[["image", 0], b"embeddings"], None])) == []
    assert harness.decode(stored(extra_keys=[["ab12"], None], parent_block_hash=7)) == []
    assert harness.decode(stored(lora_id=1, extra_keys=None)) == []
    assert harness.omissions == {Omission.CONTENT: 9}


def test_other_types_and_fields_are_counted(harness: Harness) -> None:
    assert harness.decode({"type": "BlockUpdated", "x": 1}, ["Other", 1], stored(later=1, also=2)) == [
        EXPECTED
    ]
    assert harness.decode([*["AllBlocksCleared"], 1]) == [EngineCleared()]
    assert harness.omissions == {Omission.UNKNOWN_TYPE: 2, Omission.UNKNOWN_FIELD: 3}


def test_the_first_group_over_the_whole_context_tells_tokens_and_others_what_they_need(
    harness: Harness,
) -> None:
    """A hybrid model: sliding windows first, then two groups with the whole context."""
    window = stored(
        group_idx=0,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=2 * SIZE + 2,
        token_ids=TOKENS[:7],
    )
    second = EngineStored([11, 12], group=2)
    windows = EngineStored([11, 12], group=0, needed_blocks=3)
    assert harness.decode(window, stored(group_idx=1), stored(group_idx=2)) == [windows, EXPECTED, second]
    gone = [
        {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": group}
        for group in (0, 1, 2)
    ]
    assert harness.decode(*gone) == [
        EngineRemoved([11], group=0), EngineRemoved([11]), EngineRemoved([11], group=2),
    ]  # fmt: skip
    assert not harness.omissions


def test_groups_whose_needs_are_not_known_do_not_count(harness: Harness) -> None:
    others = [
        stored(group_idx=1, kv_cache_spec_kind="mamba"),
        stored(group_idx=2, kv_cache_spec_kind="sliding_window"),
        stored(
            group_idx=3,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=8,
            block_size=2 * SIZE,
        ),
        stored(group_idx=4, kv_cache_spec_kind="full_attention", block_size=2 * SIZE),
    ]
    assert harness.decode(stored(), *others) == [EXPECTED]
    gone = [
        {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": n} for n in range(1, 5)
    ]
    assert harness.decode(*gone) == []
    assert harness.omissions == {Omission.GROUP: 2 * 4 + 4}


@pytest.mark.parametrize(
    ("event", "what"),
    [
        ([], "event"),
        ({}, "event type"),
        (stored(block_hashes=7), "block_hashes"),
        (stored(block_hashes=["x" * 1000] * 1000), "block_hashes"),
        (stored(block_hashes=[bytes(65), 1]), "block hash"),
        (stored(parent_block_hash=1.5), "parent_block_hash"),
        (stored(token_ids=[2**31] * 8), "token_ids"),
        (stored(medium=4), "medium"),
        (stored(kv_cache_spec_kind=["full_attention"]), "kv_cache_spec_kind"),
        (stored(lora_name=4), "lora_name"),
        (stored(extra_keys=[4, None]), "extra_keys"),
        (stored(extra_keys=[[["cd34", SIZE]], None]), "an offset below 4"),
        (["BlockRemoved"], "block_hashes"),
    ],
)
def test_malformed_events_are_refused(harness: Harness, event: Any, what: str) -> None:
    with pytest.raises(ProtocolError, match=what) as caught:
        harness.decode(event)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x93", b"\x90", b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000, b"\xa2\xff\xff", b"\x80",
     msgspec.msgpack.encode([0.0, 5, 0])],
)  # fmt: skip
def test_malformed_messages_are_refused(harness: Harness, payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="KV events"):
        harness.message(payload)


def _array(count: int, element: bytes) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + element * count


def _field(name: str, value: bytes) -> bytes:
    event = b"\x83\xa4type\xabBlockStored" + (b"" if name == "block_hashes" else b"\xacblock_hashes\x90")
    return b"\x92\x00\x91" + event + msgspec.msgpack.encode(name) + value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (b"\x92\x00" + _array(EVENTS_MAX + 1, b"\x90"), "batch: expected at most 524288 elements, got 524289"),
        (_array(8_000_000, b"\x90"), "batch: expected at most 64 elements, got 8000000"),
        (b"\x92\x00\x91" + _array(8_000_000, b"\x90"), "event: expected at most 64 elements, got 8000000"),
        (b"\x92\x00\x91\xdf\x00\x7a\x12\x00" + b"\xa0\xc0" * 8_000_000, "event: expected at most 64 elements, got 8000000"),
        (_field("token_ids", _array(VALUES_MAX + 1, b"\x90")), "token_ids: expected at most 1048576 elements, got 1048577"),
        (b"\x92\x00\x91\x82\xa4type\xabBlockStored\xacblock_hashes" + _array(8_000_000, b"\x90"), "block_hashes: expected at most"),
    ],
    ids=["events", "batch", "array", "map", "tokens", "hashes"],
)  # fmt: skip
def test_what_is_too_long_is_refused_before_it_is_decoded(
    harness: Harness, payload: bytes, what: str
) -> None:
    """Each array decoded is an object that Python's collector follows: none is made."""
    gc.collect()
    before = gc.get_stats()[0]["collections"]
    with pytest.raises(ProtocolError, match=what):
        harness.message(payload)
    assert gc.get_stats()[0]["collections"] - before < 10


def test_a_large_message_comes_in_parts(harness: Harness) -> None:
    events = [
        stored(block_hashes=[number], token_ids=TOKENS[:SIZE], extra_keys=None) for number in range(600)
    ]
    parts = list(harness.decoder.decode(msgspec.msgpack.encode([1.5, events, 0])))
    assert max(map(len, parts)) <= 256
    assert sum(map(len, parts)) == 600


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
            harness.message(bytes(message))
        except ProtocolError:
            refused += 1
    assert 5_000 < refused < 10_000
