"""A request goes to the data-parallel rank that has its prompt, unless that one is much busier."""

from penstock.core.hashing import block_hashes
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import PackedHashes, hash_list, pack_hashes, pack_tokens
from penstock.engine.kv_events.ranks import RankedBlocks
from penstock.engine.vllm.ranks import RankChoice
from penstock.engine.vllm.requests import Running

SIZE = 16
PROMPT = list(range(8 * SIZE))
HASHES = block_hashes(PROMPT, SIZE)
NAMES = hash_list(HASHES[:, 0])


class Ranks:
    def __init__(self, count: int) -> None:
        self._blocks = RankedBlocks(count)
        self.merge = self._blocks.merge
        self.choose = RankChoice(self._blocks, SIZE).choose


def request(blocks: int = 8, *, hashed: bool = True) -> Request:
    return Request(
        request_id="r",
        model="m",
        token_ids=pack_tokens(PROMPT[: blocks * SIZE]),
        block_hashes=pack_hashes(HASHES[:blocks].ravel()) if hashed else PackedHashes(b""),
        sampling=SamplingParams(max_tokens=4),
        expected_cached_tokens=5,
    )


def stored(names: list[int], tier: Tier = Tier.DEVICE) -> BlockStored:
    return BlockStored(block_hashes=pack_hashes(names), parent_block_hash=None, block_size=SIZE, tier=tier)


def on(rank: int, missing: int = 0) -> Running:
    return Running(request(), 0.0, 1, missing, rank=rank)


def test_the_rank_with_most_of_the_prompt_gets_it() -> None:
    ranks = Ranks(3)
    ranks.merge(1, [stored(NAMES[:2])])
    ranks.merge(2, [stored(NAMES[:1]), stored(NAMES[1:3], Tier.HOST), stored(NAMES[4:])])
    assert ranks.choose(request(), []) == (2, 3 * SIZE)
    assert ranks.choose(request(3), []) == (2, 3 * SIZE)
    ranks.merge(2, [BlockRemoved(block_hashes=pack_hashes(NAMES[1:2]), tier=Tier.HOST)])
    assert ranks.choose(request(), []) == (1, 2 * SIZE)


def test_work_ahead_outweighs_a_prefix() -> None:
    ranks = Ranks(2)
    ranks.merge(0, [stored(NAMES[:4])])
    assert ranks.choose(request(), [on(0)] * 3) == (0, 4 * SIZE)
    assert ranks.choose(request(), [on(0)] * 5) == (1, 0)
    assert ranks.choose(request(), [on(0, missing=200), on(1)]) == (1, 0)


def test_equal_ranks_take_turns() -> None:
    ranks = Ranks(3)
    assert [ranks.choose(request(hashed=False), [])[0] for _ in range(5)] == [0, 1, 2, 0, 1]


def test_a_cleared_rank_leaves_the_others_their_blocks() -> None:
    ranks = Ranks(2)
    both = [stored(NAMES[:2]), stored(NAMES[:1], Tier.HOST), stored(NAMES[:1])]
    assert ranks.merge(0, both) == both
    ranks.merge(1, [stored(NAMES[:3])])
    gone = ranks.merge(0, [AllBlocksCleared()])
    assert gone == [
        BlockRemoved(block_hashes=pack_hashes([NAMES[0], NAMES[0], NAMES[1]])),
        BlockRemoved(block_hashes=pack_hashes(NAMES[:1]), tier=Tier.HOST),
    ]
    assert ranks.choose(request(), []) == (1, 3 * SIZE)
    assert ranks.merge(0, [AllBlocksCleared()]) == []


def test_one_rank_is_the_worker() -> None:
    ranks = Ranks(1)
    cleared = [AllBlocksCleared()]
    assert ranks.merge(0, cleared) is cleared
    assert ranks.choose(request(), []) == (0, None)
    assert Running.of(request(), 0.0, 0, None).missing == 8 * SIZE - 5
    assert Running.of(request(), 0.0, 1, 48).missing == 8 * SIZE - 48
