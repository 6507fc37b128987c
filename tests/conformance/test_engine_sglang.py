"""The SGLang adapter over a fake of the package: SGLang itself needs a GPU and is not run in CI."""

import pytest

from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.sglang.engine import SglangEngine
from penstock.engine.spec import EngineSpec
from penstock.testing.engines.caching import CachingEngineSuite
from penstock.testing.engines.engine import EngineSuite
from tests.fakes import sglang as fake
from tests.fakes.scheduler import installed

pytest.importorskip("zmq")


@pytest.fixture(autouse=True)
def _sglang(monkeypatch):
    monkeypatch.setattr(fake.MODEL, "eos_token_ids", (7, 9))
    with installed("sglang", fake, "0.5.23"):
        yield


@pytest.mark.nightly
@pytest.mark.slow
class TestSglangEngine(EngineSuite, CachingEngineSuite):
    eos_token_ids = (7, 9)
    token_exact_migration = False  # penalties and seeds begin anew
    refuses_late = True
    events_delay_s = 0.3

    def make_engine(self, setup):
        return SglangEngine(
            EngineSpec(
                model="tiny",
                block_size=setup.block_size,
                context_length=setup.context_length,
                vocab_size=self.vocab_size,
                eos_token_ids=self.eos_token_ids,
                kv_blocks=setup.kv_blocks,
                max_batch_tokens=setup.max_batch_tokens,
                max_running_requests=setup.max_running_requests,
                scheduler=SchedulerConfig(max_waiting_requests=setup.max_waiting_requests),
                args={"device": "cpu"},
            )
        )
