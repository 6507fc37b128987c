"""Polled KV events get the salts of the requests that computed their blocks."""

from collections.abc import Iterable

from penstock.core.hashing import block_hashes
from penstock.core.types.events import BlockStored, KvEvent
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


def hashes_of(events: Iterable[KvEvent]) -> list[int]:
    told = [event for event in events if isinstance(event, BlockStored)]
    return [low for event in told for low in unpack_hashes(event.block_hashes).tolist()]


def expected(tokens: list[int], salt: bytes) -> list[int]:
    return block_hashes(pack_tokens(tokens), SIZE, salt)[:, 0].tolist()


def test_each_rank_has_a_cache_of_its_own_and_prompts_have_the_salts_of_their_requests() -> None:
    cache = PolledCache(EngineSpec(model="m", block_size=SIZE, data_parallel=2))
    tokens, unknown = list(range(8)), list(range(20, 28))
    cache.expect(tokens, "aa")
    found = cache.translate(
        [stored(0, tokens, rank=1), stored(0, tokens, rank=0), stored(1, unknown, rank=0)]
    )
    assert [rank for rank, _ in found] == [0, 1]
    sent = expected(tokens, b"\xaa")
    assert [hashes_of(events) for _, events in found] == [sent + expected(unknown, b""), sent]
    assert not cache.omissions
