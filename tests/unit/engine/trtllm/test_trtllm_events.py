"""Polled KV events get the salts of the requests that computed their blocks."""

from penstock.core.hashing import block_hashes
from penstock.core.types.events import BlockStored
from penstock.core.wire import pack_tokens, unpack_hashes
from penstock.engine.spec import EngineSpec
from penstock.engine.trtllm.events import PolledCache

SIZE = 4


def stored(number: int, tokens: list[int], *, parent: int | None = None, rank: int | None = None) -> dict:
    blocks = [
        {
            "block_hash": 1000 * number + token,
            "tokens": [{"token_id": each} for each in tokens[token : token + SIZE]],
        }
        for token in range(0, len(tokens), SIZE)
    ]
    event = {
        "event_id": number,
        "window_size": 64,
        "data": {"type": "stored", "parent_hash": parent, "blocks": blocks},
    }
    return event if rank is None else event | {"attention_dp_rank": rank}


def stored_hashes(cache: PolledCache, *polled: dict) -> list[int]:
    found = cache.translate(polled)
    return [
        low
        for _, events in found
        for event in events
        if isinstance(event, BlockStored)
        for low in unpack_hashes(event.block_hashes).tolist()
    ]


def expected(tokens: list[int], salt: bytes) -> list[int]:
    return block_hashes(pack_tokens(tokens), SIZE, salt)[:, 0].tolist()


def test_a_prompt_has_the_salt_of_its_request() -> None:
    cache = PolledCache(EngineSpec(model="m", block_size=SIZE))
    tokens = list(range(12))
    cache.expect(tokens, b"tenant".hex())
    assert stored_hashes(cache, stored(0, tokens)) == expected(tokens, b"tenant")


def test_a_prompt_that_nobody_sent_has_none() -> None:
    cache = PolledCache(EngineSpec(model="m", block_size=SIZE))
    cache.expect([9, 9], "00")
    assert stored_hashes(cache, stored(0, list(range(8)))) == expected(list(range(8)), b"")


def test_each_rank_has_a_cache_of_its_own() -> None:
    cache = PolledCache(EngineSpec(model="m", block_size=SIZE, data_parallel=2))
    tokens = list(range(8))
    cache.expect(tokens, "aa")
    found = cache.translate([stored(0, tokens, rank=1), stored(0, tokens, rank=0)])
    assert [rank for rank, _ in found] == [0, 1]
    for _, events in found:
        lows = [low for event in events for low in unpack_hashes(event.block_hashes).tolist()]
        assert lows == expected(tokens, b"\xaa")
    assert not cache.omissions


def test_the_salts_of_old_prompts_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr("penstock.engine.trtllm.events._PROMPTS_MAX", 2)
    cache = PolledCache(EngineSpec(model="m", block_size=SIZE))
    prompts = [[number] * SIZE for number in range(3)]
    for prompt in prompts:
        cache.expect(prompt, "bb")
    assert stored_hashes(cache, stored(0, prompts[0])) == expected(prompts[0], b"")
    assert stored_hashes(cache, stored(1, prompts[2])) == expected(prompts[2], b"\xbb")
