"""The engine suites on a real vLLM; tests with equal limits share an engine."""

from typing import ClassVar

import pytest

from penstock.engine.registry import create_engine
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.testing.engines.caching import CachingEngineSuite
from penstock.testing.engines.engine import EngineSuite
from penstock.testing.engines.probe import EngineSetup
from tests.support.checkpoints import EOS_TOKEN_ID


class TestVllmEngine(EngineSuite, CachingEngineSuite):
    vocab_size: ClassVar[int] = 512
    eos_token_ids: ClassVar[tuple[int, ...]] = (EOS_TOKEN_ID,)
    setup: ClassVar[EngineSetup] = EngineSetup(block_size=32, kv_blocks=64)
    starts_slowly: ClassVar[bool] = True
    time_limit_s: ClassVar[float] = 300.0
    token_exact_migration: ClassVar[bool] = False
    events_delay_s: ClassVar[float] = 1.0

    @pytest.fixture(autouse=True)
    def _use(self, spec_of) -> None:
        self.spec_of = spec_of

    def make_engine(self, setup: EngineSetup):
        return create_engine(
            "vllm",
            self.spec_of(
                block_size=setup.block_size,
                kv_blocks=setup.kv_blocks,
                context_length=setup.context_length,
                max_batch_tokens=setup.max_batch_tokens,
                max_running_requests=setup.max_running_requests,
                scheduler=SchedulerConfig(
                    max_batch_tokens=setup.max_batch_tokens,
                    max_running_requests=setup.max_running_requests,
                    max_waiting_requests=setup.max_waiting_requests,
                ),
            ),
        )

    async def clear_cache(self, engine):
        assert await engine._core.reset_prefix_cache_async()
