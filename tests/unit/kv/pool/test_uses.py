"""What a pool does with the uses of its blocks: order, priorities and their end."""

import math

import pytest

from penstock.kv.pool.pool import BlockPool
from penstock.kv.pool.use import BlockUse, PrefillPrice
from tests.unit.kv.pool.test_pool import chain

ONCE = BlockUse()


@pytest.fixture(params=[False, True], ids=["native", "reference"])
def make_pool(request):
    def make(num_blocks, policy="seconds", price=None, block_size=4, tenant_share=1.0):
        return BlockPool(
            num_blocks,
            block_size,
            policy,
            price=price,
            tenant_share=tenant_share,
            in_python=request.param,
        )

    return make


def run(pool, hashes, use=ONCE):
    """Run a request through the pool; return how many of its blocks were cached."""
    held = pool.match(hashes)
    pool.acquire(held)
    taken = pool.allocate(len(hashes) - len(held))
    pool.commit(taken, hashes[len(held) :], int(hashes[len(held) - 1, 0]) if held else None)
    pool.release(held + taken, use)
    pool.check()
    return len(held)


def cached(pool, hashes):
    return len(pool.match(hashes))


def test_lower_priorities_are_evicted_first(make_pool):
    pool = make_pool(9)
    high, low, usual = chain(3), chain(3, first=1000), chain(3, first=2000)
    run(pool, high, BlockUse(priority=1))
    run(pool, low, BlockUse(priority=-1))
    run(pool, usual)
    run(pool, chain(3, first=3000), BlockUse(priority=7))
    assert [cached(pool, hashes) for hashes in (high, low, usual)] == [3, 0, 3]
    run(pool, chain(3, first=4000), BlockUse(priority=7))
    assert [cached(pool, hashes) for hashes in (high, usual)] == [3, 0]


def test_a_priority_ends_with_its_time(make_pool):
    pool = make_pool(6)
    kept, usual = chain(3), chain(3, first=1000)
    run(pool, kept, BlockUse(priority=3, until_s=10.0))
    run(pool, usual)
    pool.expire(9.9, 10)
    run(pool, chain(3, first=2000))
    assert [cached(pool, hashes) for hashes in (kept, usual)] == [3, 0]
    pool.expire(10.0, 10)
    run(pool, chain(3, first=3000), BlockUse(priority=1))
    run(pool, chain(3, first=4000), BlockUse(priority=1))
    assert cached(pool, kept) == 0


def test_priorities_of_many_blocks_end_a_few_at_a_time(make_pool):
    pool = make_pool(8)
    later, sooner = chain(2), chain(2, first=1000)
    run(pool, later, BlockUse(priority=3, until_s=10.0))
    run(pool, sooner, BlockUse(priority=3, until_s=9.0))
    run(pool, chain(4, first=2000), BlockUse(priority=1))
    pool.expire(20.0, 2)  # those of `sooner`
    run(pool, chain(2, first=3000), BlockUse(priority=5))
    assert [cached(pool, hashes) for hashes in (later, sooner)] == [2, 0]
    pool.expire(20.0, 2)
    run(pool, chain(2, first=4000), BlockUse(priority=5))
    assert cached(pool, later) == 0


def test_a_dear_prefix_stays_before_a_cheap_one(make_pool):
    """Equal chances: what is deeper costs more to compute, unless a tier below gives it back."""
    for load_s, dear in ((math.inf, True), (1e-9, False)):
        pool = make_pool(20, price=PrefillPrice(1.0, 1.0, load_s), block_size=1024)
        deep, shallow = chain(12), chain(2, first=1000)
        run(pool, deep)
        run(pool, shallow)
        run(pool, chain(8, first=2000))
        assert (cached(pool, deep) > 10) == dear


@pytest.mark.parametrize(("priority", "until_s"), [(8, math.inf), (-9, math.inf), (0, math.nan)])
def test_a_wrong_use_is_refused_and_changes_nothing(make_pool, priority, until_s):
    pool = make_pool(4)
    held = pool.allocate(2)
    with pytest.raises(ValueError, match="priority from -8 to 7"):
        pool.release(held, BlockUse(priority=priority, until_s=until_s))
    assert pool.num_active == 2


@pytest.mark.parametrize("policy", ["lru", "seconds"])
def test_a_tenant_past_its_share_loses_its_own_blocks_first(make_pool, policy):
    """One that floods the cache, with a high priority, leaves the other's blocks where they are."""
    quiet, loud = BlockUse(tenant=1), BlockUse(tenant=2, priority=7, until_s=1e9)
    for share, stays in ((0.5, 4), (1.0, 0)):
        pool = make_pool(20, policy, tenant_share=share)
        kept = chain(4)
        run(pool, kept, quiet)
        for number in range(10):
            run(pool, chain(6, first=1000 * (number + 1)), loud)
        assert cached(pool, kept) == stays


@pytest.mark.parametrize("policy", ["lru", "seconds"])
def test_a_tenant_may_have_what_nobody_else_wants(make_pool, policy):
    pool = make_pool(20, policy, tenant_share=0.25)
    first, second = chain(9), chain(9, first=1000)
    for hashes in (first, second):
        run(pool, hashes, BlockUse(tenant=1))
    assert (cached(pool, first), cached(pool, second)) == (9, 9)
    run(pool, chain(4, first=2000), BlockUse(tenant=2))
    assert cached(pool, first) + cached(pool, second) == 16


def test_blocks_that_two_tenants_use_are_the_last_users(make_pool):
    pool = make_pool(12, tenant_share=0.34)
    shared = chain(4)
    run(pool, shared, BlockUse(tenant=1))
    run(pool, shared, BlockUse(tenant=2))
    for number in range(4):  # of its own it has up to 8, and no more than 4 when others need room
        run(pool, chain(4, first=1000 * (number + 1)), BlockUse(tenant=1))
    assert cached(pool, shared) == 4
