import numpy as np
import pytest

from penstock.core.hashing import block_hashes
from penstock.core.types.events import BlockRemoved
from penstock.core.wire import pack_hashes
from penstock.kv.pool import BlockPool


@pytest.fixture(params=[False, True], ids=["native", "reference"])
def make_pool(request):
    """Pools as they are made by default, and their reference; without the native module both are the reference."""

    def make(num_blocks, block_size):
        return BlockPool(num_blocks, block_size, in_python=request.param)

    return make


def chain(num_blocks, block_size=4, first=0):
    return block_hashes(np.arange(first, first + num_blocks * block_size, dtype=np.int32), block_size)


def fill(pool, hashes):
    """Put a finished sequence's blocks into the cache."""
    block_ids = pool.allocate(len(hashes))
    pool.commit(block_ids, hashes, None)
    pool.release(block_ids)
    pool.check()
    return block_ids


def test_keys_are_all_128_bits(make_pool):
    pool = make_pool(4, 4)
    hashes = chain(1)
    fill(pool, hashes)
    other = hashes.copy()
    other[0, 1] += np.uint64(1)
    assert pool.match(hashes) != []
    assert pool.match(other) == []


def test_wrong_content_is_forgotten_and_its_owner_keeps_the_block(make_pool):
    pool = make_pool(6, 4)
    hashes = chain(3)
    held = pool.allocate(3)
    pool.commit(held, hashes, None)
    pool.take_events()
    pool.forget(held[1:])
    (event,) = pool.take_events()
    assert isinstance(event, BlockRemoved)
    assert event.block_hashes == pack_hashes(hashes[1:, 0])
    assert pool.match(hashes) == held[:1]
    pool.forget(held[1:])
    assert pool.take_events() == ()
    pool.commit(held[1:], hashes[1:], int(hashes[0, 0]))
    assert pool.match(hashes) == held
    pool.check()


def test_misuse_is_an_assertion(make_pool):
    pool = make_pool(4, 4)
    held = pool.allocate(1)
    pool.release(held)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(held)
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.commit(held, chain(1), None)
    with pytest.raises(ValueError, match="as many hashes"):
        pool.commit(held, chain(2), None)
    with pytest.raises(ValueError, match="num_blocks"):
        make_pool(0, 4)
