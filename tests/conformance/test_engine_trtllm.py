"""The TensorRT-LLM adapter over a fake of the package: TensorRT-LLM itself needs a GPU and is not run in CI."""

import pytest

from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.spec import EngineSpec
from penstock.engine.trtllm import engine as adapter
from penstock.testing.engines.caching import CachingEngineSuite
from penstock.testing.engines.engine import EngineSuite
from tests.fakes import tensorrt_llm as fake
from tests.fakes.scheduler import installed


@pytest.fixture(autouse=True)
def _tensorrt_llm(monkeypatch):
    monkeypatch.setattr(adapter, "check_gpu", lambda *_: 0)
    monkeypatch.setattr(fake.MODEL, "eos_token_ids", (7, 9), raising=False)
    with installed("tensorrt_llm", fake, "1.1.0"), installed("tensorrt_llm.llmapi", fake, "1.1.0"):
        yield


@pytest.mark.nightly
@pytest.mark.slow
class TestTrtllmEngine(EngineSuite, CachingEngineSuite):
    eos_token_ids = (7, 9)
    token_exact_migration = False  # penalties and seeds begin anew
    refuses_late = True
    events_delay_s = 0.3

    def make_engine(self, setup):
        return adapter.TrtllmEngine(
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
            )
        )
