from penstock.testing.engines.batched import BatchedEngineSuite
from penstock.testing.engines.caching import CachingEngineSuite
from penstock.testing.engines.engine import EngineSuite
from penstock.testing.engines.movable_kv.suite import MovableKvSuite
from penstock.testing.engines.reference import reference_engine


class TestMockEngine(EngineSuite, CachingEngineSuite, MovableKvSuite, BatchedEngineSuite):
    eos_token_ids = (7, 9)

    def make_engine(self, setup):
        return reference_engine(setup, self.vocab_size, self.eos_token_ids)
