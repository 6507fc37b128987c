"""vLLM passes the suite of engines with a prefix cache."""

import pytest

from penstock.engine.registry import create_engine
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.spec import EngineSpec
from penstock.testing.engines.caching import CachingEngineSuite
from penstock.testing.engines.probe import EngineSetup
from tests.vllm.conftest import BLOCK, TIMEOUT_S


class TestVllmCache(CachingEngineSuite):
    setup = EngineSetup(block_size=BLOCK, kv_blocks=64, context_length=512)
    starts_slowly = True
    time_limit_s = TIMEOUT_S
    events_delay_s = 1.0

    @pytest.fixture(autouse=True)
    def _model(self, model_dir):
        self.model = str(model_dir)

    def make_engine(self, setup):
        return create_engine(
            "vllm",
            EngineSpec(
                model=self.model,
                block_size=setup.block_size,
                context_length=setup.context_length,
                kv_blocks=setup.kv_blocks,
                max_batch_tokens=setup.max_batch_tokens,
                max_running_requests=setup.max_running_requests,
                scheduler=SchedulerConfig(max_waiting_requests=setup.max_waiting_requests),
                dtype="float32",
                device="cpu:0",
                args={"enforce_eager": True},
            ),
        )

    async def clear_cache(self, engine):
        assert await engine._core.reset_prefix_cache_async()
