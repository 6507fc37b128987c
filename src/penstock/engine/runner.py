"""What an engine is made of beside the scheduler: something that computes one planned step.

All engines share scheduler, pool and loop, so that the same requests give the same KV events; a runner is
where they differ. It owns the model and the memory of the blocks, and knows neither requests' ends nor queues.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from penstock.core.log import get_logger
from penstock.core.types.events import Tier
from penstock.core.types.kv_layout import KvLayout
from penstock.engine.scheduling.sequences import Sampled, SequenceTable, StepPlan
from penstock.kv.pool.pool import BlockPool
from penstock.kv.tiers.onboarding import Onboarding, TierCopier
from penstock.kv.tiers.tiers import TieredPool

_log = get_logger()


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a runner says once its model is loaded.

    `context_length` is the model's own limit; the engine lowers it to what `num_blocks` can hold. `lower_blocks` are
    those of each tier beneath the device, nearest first. `kv_layout` is None where it keeps no memory for blocks.
    """

    num_blocks: int
    block_size: int
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    kv_bytes_per_block: int = 0
    lower_blocks: tuple[tuple[Tier, int], ...] = ()
    kv_layout: KvLayout | None = None

    def make_pool(
        self, copier: TierCopier | None, on_arrival: Callable[[], None]
    ) -> tuple[BlockPool | TieredPool, Onboarding | None]:
        """Make the pool of an engine of this kind, and with lower tiers what brings their blocks back.

        Args:
            mover: copies blocks between tiers; needed where there are several.
            on_arrival: called when a request's prefix has come from a lower tier.
        """
        device = BlockPool(self.num_blocks, self.block_size)
        if not self.lower_blocks:
            return device, None
        assert copier is not None, "an engine with lower tiers moves blocks between them"
        lower = [BlockPool(count, self.block_size, tier=tier) for tier, count in self.lower_blocks]
        pool = TieredPool(device, lower, copier)
        return pool, Onboarding(pool, copier, on_arrival)


def end_tokens_within(vocab_size: int, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Leave out, with one warning, the end-of-sequence ids that the model can never sample: some checkpoints name such."""
    known = tuple(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
    if len(known) < len(eos_token_ids):
        foreign = [token_id for token_id in eos_token_ids if token_id not in known]
        _log.warning("eos_token_ids_past_vocabulary", left_out=foreign, vocab_size=vocab_size)
    return known


class Runner(Protocol):
    """Computes steps for a `BatchedEngine`, one at a time."""

    async def start(self) -> RunnerInfo:
        """Load the model.

        Raises:
            ConfigError: the model or a setting cannot work.
        """
        ...

    async def run(self, plan: StepPlan, table: SequenceTable) -> Sampled:
        """Write the KV of the planned tokens into their blocks and sample where `plan.samples` says so.

        The table stays as it is until this returns, and is the scheduler's again afterwards. An exception
        ends the requests of this plan with an error and leaves the others; `Sampled.errors` ends single ones.

        When it returns or raises, all that the step wrote has landed, and nothing of it is written later, though a device
        only queues work: the blocks are announced, read by others and given to other requests from then on.
        """
        ...

    def kv_memory(self) -> Sequence[Sequence[object]]:
        """Give the memory of all blocks, as `seams.KvBlocks` says."""
        ...

    async def close(self) -> None:
        """Release everything. Safe after a failed `start`, and twice."""
        ...


class BlockingRunner(Protocol):
    """A `Runner` whose methods block, as a model's forward pass does; `ThreadedRunner` makes it one.

    `start`, `run` and `close` are called on one and the same thread, `kv_memory` on the event loop's after `start`.
    """

    def start(self) -> RunnerInfo: ...

    def run(self, plan: StepPlan, table: SequenceTable) -> Sampled: ...

    def kv_memory(self) -> Sequence[Sequence[object]]: ...

    def close(self) -> None: ...


class ThreadedRunner:
    """Runs a `BlockingRunner` on a thread of its own, so that the event loop stays responsive during a step."""

    def __init__(self, runner: BlockingRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-runner")
        self._closed = False

    async def start(self) -> RunnerInfo:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._runner.start)

    async def run(self, plan: StepPlan, table: SequenceTable) -> Sampled:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._runner.run, plan, table)

    def kv_memory(self) -> Sequence[Sequence[object]]:
        return self._runner.kv_memory()

    async def close(self) -> None:
        """Wait for the step under way, then release the runner."""
        if self._closed:
            return
        self._closed = True
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._runner.close)
        finally:
            self._thread.shutdown(wait=False)
