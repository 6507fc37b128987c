"""The engine suite on the paged engine: a tiny random model in PyTorch."""

from pathlib import Path
from typing import ClassVar

import pytest

from penstock.engine.batched import BatchedEngine
from penstock.engine.kv_tiers import KvConfig, tier_maker
from penstock.engine.runner import ThreadedRunner
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.testing.engines.batched import BatchedEngineSuite
from penstock.testing.engines.caching import CachingEngineSuite
from penstock.testing.engines.engine import EngineSuite
from penstock.testing.engines.kv_managed import KvManagedSuite
from penstock.testing.engines.movable_kv import MovableKvSuite
from penstock.testing.engines.probe import EngineSetup
from tests.support.late_runner import LateFence, LateRunner

pytest.importorskip("torch")

from penstock.engine.paged.memory import HostFence, PagedConfig
from penstock.engine.paged.runner import PagedRunner, paged_engine
from tests.support.checkpoints import EOS_TOKEN_ID, make_checkpoint

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def configs(checkpoint: Path, setup: EngineSetup) -> tuple[PagedConfig, SchedulerConfig]:
    config = PagedConfig(
        model=str(checkpoint),
        block_size=setup.block_size,
        kv_blocks=setup.kv_blocks,
        context_length=setup.context_length,
    )
    scheduling = SchedulerConfig(
        max_batch_tokens=setup.max_batch_tokens,
        max_running_requests=setup.max_running_requests,
        max_waiting_requests=setup.max_waiting_requests,
    )
    return config, scheduling


class TestPagedEngine(EngineSuite, CachingEngineSuite, MovableKvSuite, KvManagedSuite, BatchedEngineSuite):
    vocab_size: ClassVar[int] = 512
    eos_token_ids: ClassVar[tuple[int, ...]] = (EOS_TOKEN_ID,)

    @pytest.fixture(autouse=True)
    def _use(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def make_engine(self, setup: EngineSetup) -> BatchedEngine:
        return paged_engine(*configs(self.checkpoint, setup))


@pytest.mark.nightly
@pytest.mark.slow
class TestPagedEngineWithHostTier(EngineSuite, CachingEngineSuite, MovableKvSuite):
    vocab_size: ClassVar[int] = 512
    eos_token_ids: ClassVar[tuple[int, ...]] = (EOS_TOKEN_ID,)
    test_cached_tokens_are_what_the_events_said = None  # of the device; the host tier has more
    test_events_match_the_prefix_cache = None  # what is evicted depends on the copies under way

    @pytest.fixture(autouse=True)
    def _use(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def make_engine(self, setup: EngineSetup) -> BatchedEngine:
        return paged_engine(
            *configs(self.checkpoint, setup), make_tiers=tier_maker(KvConfig.model_validate({"host": "4x"}))
        )


class LateDevice(MovableKvSuite):
    """The paged engine on a device that only queues its writes."""

    vocab_size: ClassVar[int] = 512

    def __init__(self, checkpoint: Path, *, waits: bool) -> None:
        self._checkpoint = checkpoint
        self._waits = waits

    def make_engine(self, setup: EngineSetup) -> BatchedEngine:
        config, scheduling = configs(self._checkpoint, setup)

        def make_runner(fence: LateFence) -> PagedRunner:
            return PagedRunner(config, make_fence=lambda device: fence if self._waits else HostFence())

        return BatchedEngine(ThreadedRunner(LateRunner(make_runner)), scheduling)


def test_blocks_of_a_late_device_are_complete_when_they_are_announced(checkpoint):
    late = LateDevice(checkpoint, waits=True)
    late.test_blocks_are_complete_when_they_can_be_pinned()
    late.test_blocks_of_an_unfinished_prompt_can_be_pinned_with_kv_by_chunk()
    late.test_partial_blocks_are_transferred()


def test_the_suite_catches_an_engine_that_announces_blocks_early(checkpoint):
    early = LateDevice(checkpoint, waits=False)
    with pytest.raises(AssertionError, match="block 0 changed after it could be held"):
        early.test_blocks_are_complete_when_they_can_be_pinned()
    with pytest.raises(AssertionError):
        early.test_partial_blocks_are_transferred()
