"""The mock engine as a reference: for scheduling, caching and KV events."""

from penstock.engine.kv_tiers import TierMaker
from penstock.engine.mock import MockConfig, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.testing.engines.movable_kv import MovingEngine
from penstock.testing.engines.probe import EngineSetup


def reference_engine(
    setup: EngineSetup,
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
    *,
    make_tiers: TierMaker | None = None,
) -> MovingEngine:
    """Make a mock engine that checks its block tables on every step and sleeps next to no time."""
    shape = RunnerInfo(
        num_blocks=setup.kv_blocks,
        block_size=setup.block_size,
        context_length=setup.context_length,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        kv_bytes_per_block=10 * setup.block_size,
    )
    scheduler = SchedulerConfig(
        max_batch_tokens=setup.max_batch_tokens,
        max_running_requests=setup.max_running_requests,
        max_waiting_requests=setup.max_waiting_requests,
    )
    return mock_engine(shape, MockConfig(speedup=1000), scheduler, make_tiers=make_tiers)
