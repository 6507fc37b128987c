from penstock.testing.engines.case import reference_engine
from penstock.testing.engines.engine import EngineSuite


class TestMockEngine(EngineSuite):
    eos_token_ids = (7, 9)

    def make_engine(self, setup):
        return reference_engine(setup, self.vocab_size, self.eos_token_ids)
