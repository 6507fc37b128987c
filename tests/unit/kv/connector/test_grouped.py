"""Both sides of a KV connector of a model with two groups that have a window beside one over the whole context."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from penstock.core.types.events import BlockRemoved, BlockStored, Tier
from penstock.core.wire import HashArray, hash_list
from penstock.kv.connector.staging import Staging
from penstock.kv.groups import GroupKind, KvGroup, KvGroups
from penstock.kv.host_tier import HostTier
from penstock.seams.kv import KvTier
from tests.support.connected import BLOCK_SIZE, Connected, damage, hashes_of

WINDOWS = [
    KvGroup(GroupKind.SLIDING_WINDOW, (), 1, window_tokens=2 * BLOCK_SIZE),
    KvGroup(GroupKind.SLIDING_WINDOW, (), 1, window_tokens=BLOCK_SIZE + 1),
]
GROUPS = [WINDOWS[1], KvGroup(GroupKind.FULL, (), 1), WINDOWS[0]]
NEEDED = [1, None, 2]
"""Blocks of a prefix that each group needs."""
NUM_BLOCKS = 200


class Grouped(Connected):
    """Each group has its own blocks of a prompt: their content is that of the group and the position."""

    def __init__(self, tiers: Callable[[Staging], Sequence[KvTier]] | None = None) -> None:
        def host(staging: Staging) -> Sequence[KvTier]:
            return [HostTier(staging.blocks, 64, BLOCK_SIZE)]

        super().__init__(tiers or host, num_blocks=NUM_BLOCKS, groups=KvGroups(GROUPS, BLOCK_SIZE))

    def ids(self, count: int, first: int = 0) -> list[list[int]]:
        return [[first + group * count + position for position in range(count)] for group in range(3)]

    def keep_grouped(self, seed: int, count: int, ends: Sequence[int]) -> HashArray:
        """Compute a prompt, offload what the groups need at some lengths, and lose it on the device."""
        hashes, ids = hashes_of(seed, count), self.ids(count)
        for group, blocks in enumerate(ids):
            self.fill(blocks, 10 * seed + group)
        self.scheduler.commit(hashes, ids, ends)
        while self.scheduler.needs_steps:
            self.step()
        self.memories[0].blocks[:] = 0
        return hashes

    def load(self, name: str, hashes: HashArray, cached: int = 0) -> int | None:
        """Match, and load what was found into blocks from 100 on."""
        count = self.scheduler.match(name, hashes, cached, len(hashes) * BLOCK_SIZE + 1)
        if count:
            self.scheduler.reserve(name, self.ids(len(hashes), 100), count)
            self.step()
        return count

    def loaded(self, seed: int, count: int, cached: int, end: int) -> bool:
        """Say whether the last windows of a prefix of `end` blocks have arrived, and nothing else but the whole context."""
        for group, blocks in enumerate(self.ids(count, 100)):
            needed = NEEDED[group]
            first = max(cached, 0 if needed is None else end - needed)
            empty = [*blocks[:first], *blocks[end:]]
            if self.memories[0].blocks[empty].any():
                return False
            sources = self.ids(count)[group]
            self.fill(sources, 10 * seed + group)
            content = self.memories[0].blocks
            if not (content[blocks[first:end]] == content[sources[first:end]]).all():
                return False
        return True


@pytest.fixture
def scene() -> Iterator[Grouped]:
    made = Grouped()
    yield made
    made.close()


def test_a_load_brings_the_whole_context_of_one_group_and_the_last_windows_of_others(scene: Grouped) -> None:
    hashes = scene.keep_grouped(1, 8, ends=[8])
    assert scene.load("a", hashes) == 8
    assert scene.loaded(1, 8, 0, 8)
    (counts,) = scene.scheduler.counts()
    assert (counts.offloaded_blocks, counts.loaded_blocks) == (8 + 2 + 1, 8 + 2 + 1)
    assert counts.hit_tokens == 8 * BLOCK_SIZE


def test_a_prompt_that_parts_from_another_goes_on_after_the_last_windows_that_are_held(
    scene: Grouped,
) -> None:
    scene.keep_grouped(1, 8, ends=[3, 8])
    shorter = hashes_of(1, 8)[:6]
    assert scene.scheduler.match("a", shorter, 0, 100) == 3
    assert scene.scheduler.junction("a") == 6
    scene.scheduler.forget("a")
    assert scene.scheduler.junction("a") == 0
    scene.keep_grouped(1, 6, ends=[6])
    assert scene.load("b", shorter) == 6
    assert scene.scheduler.junction("b") == 0
    assert scene.loaded(1, 6, 0, 6)


def test_windows_that_the_device_has_not_kept_are_not_offloaded(scene: Grouped) -> None:
    scene.evicted = {scene.ids(8)[2][6]}
    hashes = scene.keep_grouped(1, 8, ends=[5, 8])
    assert scene.load("a", hashes) == 5, "the last block but one of the larger window was evicted"
    assert scene.loaded(1, 8, 0, 5)


def test_corrupt_blocks_end_the_load_and_are_offloaded_again(scene: Grouped) -> None:
    hashes = scene.keep_grouped(1, 8, ends=[8])
    tables = KvGroups(GROUPS, BLOCK_SIZE)
    tier = scene.workers[0].tiers[0]
    for names in (hashes[2:3], tables.others[0].names(hashes[7:8])):
        damage(tier, names)
        assert scene.load("a", hashes) == 8
        (loaded,) = scene.reports[-1].loaded
        assert loaded.missing
        assert scene.scheduler.match("a", hashes, 0, 100) == 0, "it computes"
        scene.scheduler.forget("a")
        scene.keep_grouped(1, 8, ends=[8])
        assert scene.load("b", hashes) == 8
        assert scene.loaded(1, 8, 0, 8)
        scene.scheduler.forget("b")
        scene.memories[0].blocks[:] = 0


def test_routers_hear_of_blocks_that_lead_to_held_windows(scene: Grouped) -> None:
    told: set[int] = set()

    def hear() -> None:
        for event in scene.scheduler.take_events():
            assert isinstance(event, BlockStored | BlockRemoved)
            assert event.tier is Tier.HOST
            if isinstance(event, BlockStored):
                told.update(hash_list(event.block_hashes))
            else:
                told.difference_update(hash_list(event.block_hashes))

    hashes = scene.keep_grouped(1, 8, ends=[5])
    hear()
    assert told == set(hashes[:5, 0].tolist()), "blocks 6 to 8 of the first group lead nowhere"
    scene.keep_grouped(1, 8, ends=[8])
    hear()
    assert told == set(hashes[:, 0].tolist())
    tables = KvGroups(GROUPS, BLOCK_SIZE)
    damage(scene.workers[0].tiers[0], tables.others[0].names(hashes[7:8]))
    scene.load("a", hashes)
    hear()
    assert told == set(hashes[:5, 0].tolist())
    scene.scheduler.clear()
    scene.step()
    hear()
    assert told == set()
