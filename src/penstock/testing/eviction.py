"""The conformance suite of eviction policies. Subclass it and make a policy.

class TestMyPolicy(EvictionPolicySuite):
    def make(self):
        return MyPolicy()
"""

import random

from penstock.core.hashing import block_hashes
from penstock.core.ids import BlockId
from penstock.kv.pool.eviction import EvictionPolicy
from penstock.kv.pool.pool import BlockPool

_POOL_BLOCKS = 40
_BLOCK_SIZE = 4


class EvictionPolicySuite:
    """Defines `kv.pool.eviction.EvictionPolicy`."""

    def make(self) -> EvictionPolicy:
        raise NotImplementedError

    def test_victims_are_as_many_different_candidates_as_asked(self) -> None:
        random_ = random.Random(0)
        policy = self.make()
        for size in (0, 1, 2, 5, 100):
            candidates = dict.fromkeys(BlockId(block_id) for block_id in random_.sample(range(1000), size))
            for count in {0, size // 3, size}:
                victims = policy.victims(candidates.keys(), count)
                assert len(victims) == count
                assert len(set(victims)) == count
                assert set(victims) <= candidates.keys()

    def test_a_full_pool_keeps_working(self) -> None:
        """Requests that share prefixes arrive and end in a pool with room for a fifth of their blocks."""
        random_ = random.Random(0)
        pool = BlockPool(_POOL_BLOCKS, _BLOCK_SIZE, eviction=self.make())
        live: list[list[BlockId]] = []
        for _ in range(300):
            prompt = [random_.randrange(4)] * 8 + [random_.randrange(10)] * random_.randrange(1, 40)
            hashes = block_hashes(prompt, _BLOCK_SIZE)
            held = pool.match(hashes)
            pool.acquire(held)
            taken = pool.allocate(len(hashes) - len(held))
            if taken is None:
                pool.release(held)
                pool.release(live.pop(random_.randrange(len(live))))
            else:
                held += taken
                pool.commit(held, hashes, None)
                live.append(held)
            pool.check()
        for held in live:
            pool.release(held)
        assert pool.num_available == _POOL_BLOCKS
        everything = pool.allocate(_POOL_BLOCKS)
        assert everything is not None
        assert sorted(everything) == list(range(_POOL_BLOCKS))
        assert pool.num_cached == 0
        pool.check()
