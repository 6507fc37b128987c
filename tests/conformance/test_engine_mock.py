from penstock.testing.engine import EngineSuite
from penstock.testing.engine_case import reference_engine


class TestMockEngine(EngineSuite):
    eos_token_ids = (7, 9)

    def make_engine(self, setup):
        return reference_engine(setup, self.vocab_size, self.eos_token_ids)
