"""The engine suite on `echo_engine.EchoEngine`: `PYTHONPATH=examples pytest examples/echo_engine_suite.py`."""

from echo_engine import EchoEngine

from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.spec import EngineSpec
from penstock.testing import EngineSuite
from penstock.testing.engines.probe import EngineSetup


class TestEchoEngine(EngineSuite):
    unsupported = frozenset({"logprobs"})

    def make_engine(self, setup: EngineSetup) -> EchoEngine:
        bounds = SchedulerConfig(
            max_batch_tokens=setup.max_batch_tokens,
            max_running_requests=setup.max_running_requests,
            max_waiting_requests=setup.max_waiting_requests,
        )
        return EchoEngine(
            EngineSpec(
                model="",
                block_size=setup.block_size,
                kv_blocks=setup.kv_blocks,
                context_length=setup.context_length,
                vocab_size=self.vocab_size,
                scheduler=bounds,
            )
        )
