"""The native block pool beside its Python reference, call by call: good calls in any order, and bad ones."""

import math

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.core.native import native
from penstock.kv.pool.reference import ReferencePool
from penstock.kv.pool.use import PrefillPrice

pytestmark = pytest.mark.skipif(native is None, reason="installed with PENSTOCK_NATIVE=OFF")
NUM_BLOCKS = 12
block_ids = st.integers(0, NUM_BLOCKS - 1)
# Few names, so that they come again; halves of them differ in one word only, or are in each other's place.
halves = st.sampled_from([0, 1, 2, 1 << 63, (1 << 64) - 1])
names = st.tuples(halves, halves)
until = st.sampled_from([1.0, 2.0, math.inf])


def make_pools(num_blocks, policy, tenant_blocks=None):
    price = (1.0, 0.01, 4.0)
    tenant_blocks = num_blocks if tenant_blocks is None else tenant_blocks
    native_pool = native.Pool(num_blocks, policy, 16, *price, tenant_blocks)
    return native_pool, ReferencePool(num_blocks, policy, 16, PrefillPrice(*price), tenant_blocks)


class PoolPair(RuleBasedStateMachine):
    """Calls that no engine makes in this order; whatever the reference answers, the native pool does too."""

    policy = "lru"
    tenant_blocks = NUM_BLOCKS

    def __init__(self):
        super().__init__()
        self.pools = make_pools(NUM_BLOCKS, self.policy, self.tenant_blocks)
        self.held = []

    def both(self, method, *arguments):
        """Call both and give the one answer; AssertionError stands for calls that both say are wrong."""
        answers = []
        for pool in self.pools:
            try:
                answers.append(getattr(pool, method)(*arguments))
            except AssertionError:
                answers.append(AssertionError)
        assert answers[0] == answers[1]
        return answers[0]

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count):
        self.held += self.both("allocate", count) or []

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def make_room(self, count):
        self.both("make_room", count)

    @rule(hashes=st.lists(names, max_size=4), parent=st.none() | halves, data=st.data())
    def commit(self, hashes, parent, data):
        if self.held:
            blocks = [data.draw(st.sampled_from(self.held)) for _ in hashes]
            self.both("commit", blocks, as_hashes(hashes), parent)

    @rule(hashes=st.lists(names, max_size=4))
    def match_and_acquire(self, hashes):
        found = self.both("match", as_hashes(hashes))
        self.both("count_idle", found)
        self.both("acquire", found)
        self.held += found

    @rule(
        data=st.data(),
        use=st.none() | st.tuples(st.integers(0, 2), st.integers(-8, 7), until, st.integers(0, 3)),
    )
    def release(self, data, use):
        count = data.draw(st.integers(0, len(self.held)))
        given = data.draw(st.permutations(self.held))[:count]
        self.both("release", given, *(use or ()))
        for block_id in given:
            self.held.remove(block_id)

    @rule(block_id=block_ids)
    def acquire_any(self, block_id):
        if self.both("acquire", [block_id]) is not AssertionError:
            self.held.append(block_id)

    @rule(block_id=block_ids)
    def release_any(self, block_id):
        if self.both("release", [block_id]) is not AssertionError:
            self.held.remove(block_id)

    @rule(block_id=block_ids)
    def forget_any(self, block_id):
        self.both("forget", [block_id])

    @rule(now_s=st.integers(0, 3), most=st.integers(0, 4))
    def expire(self, now_s, most):
        self.both("expire", float(now_s), most)

    @rule(load_s=st.sampled_from([0.5, 4.0, math.inf]))
    def set_price(self, load_s):
        self.both("set_price", 1.0, 0.01, load_s)

    @rule()
    def reset(self):
        self.both("reset")

    @rule()
    def take_changes(self):
        self.both("take_changes")

    @invariant()
    def they_are_alike(self):
        for pool in self.pools:
            pool.check()
        one, other = self.pools
        assert one.references() == other.references()
        assert {*rows(one.resident_hashes())} == {*rows(other.resident_hashes())}
        assert one.idle_blocks() == other.idle_blocks()
        counts = [(p.num_available, p.num_active, p.num_cached) for p in self.pools]
        assert counts[0] == counts[1]

    def teardown(self):
        self.take_changes()


PoolPair.TestCase.settings = settings(max_examples=2 * settings.default.max_examples, stateful_step_count=50)
TestPoolPair = PoolPair.TestCase


def pair_of(policy_name, tenants=NUM_BLOCKS):
    """Make the machine of another policy, or of tenants with a share."""
    machine = type(f"{policy_name}{tenants}", (PoolPair,), {"policy": policy_name, "tenant_blocks": tenants})
    machine.TestCase.settings = settings(stateful_step_count=50)
    return machine.TestCase


TestSecondsPair = pair_of("seconds")
TestTenantLruPair = pair_of("lru", 3)
TestTenantNothingPair = pair_of("seconds", 0)
TestTenantSecondsPair = pair_of("seconds", 2)


@pytest.mark.parametrize("tenant_blocks", [pytest.param(400, marks=pytest.mark.nightly), 120])
@pytest.mark.parametrize("policy", ["seconds", pytest.param("lru", marks=pytest.mark.nightly)])
def test_policies_evict_alike_through_thousands_of_requests(policy, tenant_blocks):
    """Chats, one-shot prompts behind shared prefixes and scans: enough that `seconds` learns and forgets."""
    rng = np.random.default_rng(0)
    pools = make_pools(400, policy, tenant_blocks)
    chats = [rng.integers(0, 1 << 63, (60, 2), dtype=np.uint64) for _ in range(40)]
    for number in range(1500):
        chat = (
            chats[int(rng.integers(40))] if number % 3 else rng.integers(0, 1 << 63, (20, 2), dtype=np.uint64)
        )
        hashes = chat[: int(rng.integers(1, len(chat)))]
        use = (
            int(rng.integers(3)),
            0 if number % 7 else int(rng.integers(-8, 8)),
            float(number + 50),
            number % 5,
        )
        answers = []
        for pool in pools:
            hits = pool.match(hashes)
            pool.acquire(hits)
            blocks = hits + pool.allocate(len(hashes) - len(hits))
            pool.commit(blocks, hashes, None)
            pool.release(blocks, *use)
            pool.expire(float(number), 30)
            answers.append((blocks, pool.take_changes()))
        assert answers[0] == answers[1]
    for pool in pools:
        pool.check()


def test_arrays_need_not_be_writable_or_contiguous():
    pool = native.Pool(8)
    hashes = np.arange(16, dtype=np.uint64).reshape(-1, 2)
    blocks = pool.allocate(8)
    pool.commit(blocks, np.frombuffer(hashes.tobytes(), dtype="<u8").reshape(-1, 2), None)
    assert pool.match(hashes[::-1]) == blocks[::-1]
    assert pool.match(np.asfortranarray(hashes)) == blocks


@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("match", [np.zeros((2, 3), dtype=np.uint64)], TypeError),
        ("match", [np.zeros(2, dtype=np.uint64)], TypeError),
        ("match", [b"no array"], TypeError),
        ("acquire", [["0"]], TypeError),
        ("acquire", [[-1]], AssertionError),
        ("acquire", [[8]], AssertionError),
        ("release", [[1 << 31]], TypeError),
        ("release", [[0], 4], ValueError),
        ("release", [[0], 0, 8], ValueError),
        ("release", [[0], 0, 0, math.nan], ValueError),
        ("count_idle", [[8]], AssertionError),
        ("allocate", [-1], TypeError),
        ("make_room", [-1], TypeError),
        ("commit", [[0], np.zeros((2, 2), dtype=np.uint64), None], ValueError),
        ("commit", [[0], np.zeros((1, 2), dtype=np.uint64), -1], TypeError),
        ("commit", [[8], np.zeros((1, 2), dtype=np.uint64), None], AssertionError),
    ],
)
def test_wrong_arguments_raise(method, arguments, error):
    pool = native.Pool(8)
    pool.allocate(8)
    with pytest.raises(error):
        getattr(pool, method)(*arguments)
    pool.check()
    assert pool.num_active == 8


def as_hashes(names):
    return np.array(names, dtype=np.uint64).reshape(-1, 2)


def rows(packed):
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]
