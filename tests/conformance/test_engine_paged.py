"""The engine suite on the paged engine: a tiny random model in PyTorch."""

from pathlib import Path
from typing import ClassVar

import pytest

from penstock.engine.batched import BatchedEngine
from penstock.engine.scheduler_config import SchedulerConfig
from penstock.testing.engine import EngineSuite
from penstock.testing.engine_probe import EngineSetup

pytest.importorskip("torch")

from penstock.engine.paged.config import PagedConfig
from penstock.engine.paged.engine import paged_engine
from penstock.testing.checkpoints import EOS_TOKEN_ID, make_checkpoint

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


class TestPagedEngine(EngineSuite):
    vocab_size: ClassVar[int] = 512
    eos_token_ids: ClassVar[tuple[int, ...]] = (EOS_TOKEN_ID,)

    @pytest.fixture(autouse=True)
    def _use(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def make_engine(self, setup: EngineSetup) -> BatchedEngine:
        config = PagedConfig(
            model=str(self.checkpoint),
            block_size=setup.block_size,
            kv_blocks=setup.kv_blocks,
            context_length=setup.context_length,
        )
        scheduling = SchedulerConfig(
            max_batch_tokens=setup.max_batch_tokens,
            max_running_requests=setup.max_running_requests,
            max_waiting_requests=setup.max_waiting_requests,
        )
        return paged_engine(config, scheduling)
