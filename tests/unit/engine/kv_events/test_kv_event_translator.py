"""An engine's blocks get the hashes that frontends compute for the same prompts."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from penstock.core.hashing import block_hashes
from penstock.core.types.events import BlockRemoved, BlockStored, KvEvent, Tier
from penstock.core.types.instances import ModelCard, request_salt
from penstock.core.wire import PackedTokens, hash_list, pack_tokens
from penstock.engine.kv_events.events import (
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
    Omission,
    Omissions,
)
from penstock.engine.kv_events.translator import HexSalts, KvEventTranslator

SIZE = 4
KEY = bytes(range(16))
TOKENS = list(range(100, 116))
CARD = ModelCard(name="m", context_length=64, block_size=SIZE, salt=b"weights")


def of(tokens: Sequence[int], salt: bytes = b"") -> list[int]:
    return hash_list(block_hashes(tokens, SIZE, salt, key=KEY)[:, 0])


class Harness:
    def __init__(self, salts: HexSalts | None = None, blocks_max: int = 100) -> None:
        self.omissions: Omissions = Counter()
        self.translator = KvEventTranslator(
            block_size=SIZE,
            salt_of=salts or HexSalts(),
            omissions=self.omissions,
            hash_key=KEY,
            blocks_max=blocks_max,
        )

    def translate(self, *events: EngineEvent) -> list[KvEvent]:
        out = self.translator.translate(events)
        self.translator.check()
        return out


def chain(
    hashes: list[EngineHash],
    tokens: Sequence[int],
    parent: EngineHash | None = None,
    *,
    tier: Tier = Tier.DEVICE,
    salt: bytes = b"",
    lora: str | None = None,
) -> EngineStored:
    packed = PackedTokens(bytes(pack_tokens(tokens)))
    return EngineStored(hashes, parent, packed, SIZE, tier, lora, salt.hex() or None)


def told(hashes: list[int], parent: int | None = None, tier: Tier = Tier.DEVICE) -> BlockStored:
    packed = b"".join(value.to_bytes(8, "little") for value in hashes)
    return BlockStored(block_hashes=packed, parent_block_hash=parent, block_size=SIZE, tier=tier)  # type: ignore[arg-type]


def gone(hashes: list[int], tier: Tier = Tier.DEVICE) -> BlockRemoved:
    return BlockRemoved(block_hashes=told(hashes).block_hashes, tier=tier)


def test_a_prompt_and_its_continuation() -> None:
    harness, want = Harness(), of(TOKENS)
    assert harness.translate(chain([1, 2], TOKENS[:8])) == [told(want[:2])]
    assert harness.translate(chain([b"x"], TOKENS[8:12], 2)) == [told(want[2:3], want[1])]
    assert harness.translate(chain([4], TOKENS[12:], b"x")) == [told(want[3:], want[2])]
    assert len(harness.translator) == 4
    assert not harness.omissions


def test_salts_are_those_of_requests() -> None:
    """What a frontend puts into `Request.salt`, as hexadecimal cache salt, for the base model and an adapter."""
    harness = Harness(HexSalts())
    adapted = CARD.adapted("tuned").salt
    salts = [CARD.salt, request_salt(CARD.salt, "tenant"), adapted, request_salt(adapted, "tenant")]
    for number, salt in enumerate(salts):
        lora = "tuned" if number > 1 else None
        (event,) = harness.translate(chain([number], TOKENS[:4], salt=salt, lora=lora))
        assert event == told(of(TOKENS[:4], salt))


def test_images_are_part_of_the_hashes_of_requests() -> None:
    """A frontend hashes the digest at the image's first token; vLLM names it again in each block that the image reaches."""
    harness, digest = Harness(), bytes(32)
    want = hash_list(block_hashes(TOKENS, SIZE, extra=[(2, digest), (9, b"other")], key=KEY)[:, 0])
    (event,) = harness.translate(msgspec.structs.replace(chain([1, 2], TOKENS[:8]), media=((2, digest),)))
    assert event == told(want[:2])
    (event,) = harness.translate(
        msgspec.structs.replace(chain([3, 4], TOKENS[8:], 2), media=((1, b"other"),))
    )
    assert event == told(want[2:], want[1])
    assert harness.translate(chain([5, 6], TOKENS[:8])) == [told(of(TOKENS[:8]))], (
        "text alone is another prompt"
    )


def test_prompts_without_a_salt_have_the_table_s() -> None:
    harness = Harness(HexSalts(default=CARD.salt, adapters={"tuned": CARD.adapted("tuned").salt}))
    events = harness.translate(
        chain([1], TOKENS[:4]), chain([2], TOKENS[:4], lora="tuned"), chain([3], TOKENS[:4], lora="other")
    )
    assert events == [told(of(TOKENS[:4], CARD.salt)), told(of(TOKENS[:4], CARD.adapted("tuned").salt))]
    assert (
        harness.translate(
            EngineStored([4], None, chain([4], TOKENS[:4]).token_ids, SIZE, cache_salt="of others")
        )
        == []
    )
    assert harness.omissions == {Omission.SALT: 2}


def test_copies_count_by_tier() -> None:
    harness, want = Harness(), of(TOKENS)
    stored = harness.translate(chain([1], TOKENS[:4]), chain([1], TOKENS[:4], tier=Tier.HOST))
    assert stored == [told(want[:1]), told(want[:1], tier=Tier.HOST)]
    assert harness.translate(EngineRemoved([1])) == [gone(want[:1])]
    assert len(harness.translator) == 1
    assert harness.translate(EngineRemoved([1], Tier.HOST)) == [gone(want[:1], Tier.HOST)]
    assert len(harness.translator) == 0


def test_blocks_named_without_tokens_were_described_before() -> None:
    harness, want = Harness(), of(TOKENS)
    harness.translate(chain([1, 2], TOKENS[:8]), EngineRemoved([2]))
    events = harness.translate(EngineStored([1, 2, 9], tier=Tier.HOST))
    assert events == [told(want[:1], tier=Tier.HOST), told(want[1:2], want[0], Tier.HOST)]
    assert harness.omissions == {Omission.UNKNOWN_BLOCK: 1}


def test_blocks_after_a_missed_one_are_left_out() -> None:
    harness = Harness()
    assert harness.translate(chain([2, 3], TOKENS[4:12], 1)) == []
    assert harness.omissions == {Omission.UNKNOWN_PARENT: 2}
    assert len(harness.translator) == 0


def test_a_hash_of_other_tokens_is_left_out() -> None:
    """An engine whose hashes do not cover the whole prefix cannot be followed."""
    harness, want = Harness(), of(TOKENS)
    harness.translate(chain([1, 2], TOKENS[:8]))
    assert harness.translate(chain([5, 2, 6], [9] * 4 + TOKENS[4:12])) == [told(of([9] * 4))]
    assert harness.omissions == {Omission.CONTRADICTION: 2}
    assert harness.translate(EngineRemoved([2])) == [gone(want[1:2])]


def test_the_number_of_blocks_is_bounded() -> None:
    harness, want = Harness(blocks_max=2), of(TOKENS)
    assert harness.translate(chain([1, 2, 3], TOKENS[:12])) == [told(want[:2])]
    assert harness.omissions == {Omission.FULL: 1}
