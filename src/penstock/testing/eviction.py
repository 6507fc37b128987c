"""The conformance suite of eviction policies. Subclass it and make a policy.

class TestSeconds(EvictionPolicySuite):
    policy = "seconds"
"""

import random

from penstock.core.hashing import block_hashes
from penstock.core.ids import BlockId
from penstock.kv.pool.pool import BlockPool
from penstock.kv.pool.use import BlockUse, EvictionPolicy

_POOL_BLOCKS = 40
_BLOCK_SIZE = 4


class EvictionPolicySuite:
    """Defines `kv.pool.use.EvictionPolicy`."""

    policy: EvictionPolicy
    in_python = False

    def make(self) -> BlockPool:
        return BlockPool(_POOL_BLOCKS, _BLOCK_SIZE, eviction=self.policy, in_python=self.in_python)

    def test_a_full_pool_keeps_working(self) -> None:
        """Requests that share prefixes arrive and end in a pool with room for a fifth of their blocks."""
        random_ = random.Random(0)
        pool = self.make()
        live: list[list[BlockId]] = []
        for _ in range(300):
            prompt = [random_.randrange(4)] * 8 + [random_.randrange(10)] * random_.randrange(1, 40)
            hashes = block_hashes(prompt, _BLOCK_SIZE)
            held = pool.match(hashes)
            pool.acquire(held)
            taken = pool.allocate(len(hashes) - len(held))
            if taken is None:
                pool.release(held)
                pool.release(live.pop(random_.randrange(len(live))), BlockUse())
            else:
                held += taken
                pool.commit(held, hashes, None)
                live.append(held)
            pool.check()
        for held in live:
            pool.release(held, BlockUse())
        assert pool.num_available == _POOL_BLOCKS
        everything = pool.allocate(_POOL_BLOCKS)
        assert everything is not None
        assert sorted(everything) == list(range(_POOL_BLOCKS))
        assert pool.num_cached == 0
        pool.check()

    def test_a_prefix_that_is_used_all_the_time_stays(self) -> None:
        """Of one-shot prompts behind a shared prefix, the prefix is never evicted once it is known."""
        pool = self.make()
        for number in range(60):
            hashes = block_hashes([7] * 4 * _BLOCK_SIZE + [number] * 16 * _BLOCK_SIZE, _BLOCK_SIZE)
            held = pool.match(hashes)
            assert len(held) == (4 if number else 0)
            pool.acquire(held)
            taken = pool.allocate(len(hashes) - len(held))
            assert taken is not None
            pool.commit(held + taken, hashes, None)
            pool.release(held + taken, BlockUse())
            pool.check()
