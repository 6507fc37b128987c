from penstock.engine.kv_tiers import KvConfig, tier_maker
from penstock.engine.mock import MockRanks
from penstock.testing.engines.batched import BatchedEngineSuite
from penstock.testing.engines.caching import CachingEngineSuite
from penstock.testing.engines.engine import EngineSuite
from penstock.testing.engines.kv_managed import KvManagedSuite
from penstock.testing.engines.movable_kv import MovableKvSuite
from penstock.testing.engines.reference import reference_engine


class TestMockEngine(EngineSuite, CachingEngineSuite, MovableKvSuite, KvManagedSuite, BatchedEngineSuite):
    eos_token_ids = (7, 9)

    def make_engine(self, setup):
        return reference_engine(setup, self.vocab_size, self.eos_token_ids)


class TestMockEngineWithHostTier(EngineSuite, CachingEngineSuite, MovableKvSuite):
    eos_token_ids = (7, 9)
    test_cached_tokens_are_what_the_events_said = None  # of the device; the host tier has more
    test_events_match_the_prefix_cache = None  # what is evicted depends on the copies under way

    def make_engine(self, setup):
        make_tiers = tier_maker(KvConfig(host="4x"))
        return reference_engine(setup, self.vocab_size, self.eos_token_ids, make_tiers=make_tiers)


class TestMockRanks(EngineSuite, CachingEngineSuite):
    """One engine of two ranks. Requests without a rank are spread, so what is cached is that of one rank."""

    eos_token_ids = (7, 9)

    def make_engine(self, setup):
        return MockRanks([reference_engine(setup, self.vocab_size, self.eos_token_ids) for _ in range(2)])
