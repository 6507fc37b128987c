"""The exact engine: the real scheduler and pool, with steps that only take time."""

from collections.abc import Sequence

import numpy as np

from penstock.core.types.instances import EngineInfo
from penstock.core.types.requests import Request
from penstock.engine.batched import BatchedEngine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.kv.manager import KvManager
from penstock.kv.pool import BlockPool
from penstock.perf.latency import LatencyModel
from penstock.sim.engine.prices import prefill_price
from penstock.sim.engine.timed_tier import LowerTier, timed_kv_manager
from penstock.sim.engine.timing import Pace, TimingRunner
from penstock.sim.workload.prompt import StreamOf


class ExactEngine(BatchedEngine):
    """A `BatchedEngine` on a `TimingRunner`: the reference of the jump engine."""

    def __init__(
        self,
        latency: LatencyModel,
        info: RunnerInfo,
        config: SchedulerConfig,
        pace: Pace | None = None,
        stream_of: StreamOf | None = None,
        *,
        lower_tiers: Sequence[LowerTier] = (),
    ) -> None:
        """Create the engine; `start` starts it.

        Args:
            latency: gives the time of each step.
            info: the simulated model.
            config: scheduler settings.
            pace: speed of the host; None for a constant one.
            stream_of: gives the names of output blocks; None hashes the tokens.
            lower_tiers: KV tiers below the device.
        """
        self._latency = latency
        self._pace = pace or Pace()
        self._lower_tiers = lower_tiers
        price = prefill_price(latency, lower_tiers)
        super().__init__(TimingRunner(latency, info, self._pace), config, price=price)
        self._block_size = info.block_size
        self._stream_of = stream_of

    async def start(self) -> EngineInfo:
        """Start the engine without transfer of partial blocks, which the jump engine lacks too."""
        info = await super().start()
        self.scheduler.partial_blocks.keeps_any = False
        return info

    def submit(self, request: Request) -> None:
        super().submit(request)
        if self._stream_of is None:
            return
        sequence = self.scheduler._by_id[request.request_id]
        first, end = len(sequence.block_hashes), sequence.end_tokens // self._block_size
        if end > first:
            names = self._stream_of(request).block_hashes(self._block_size, first, end)
            sequence.block_hashes = np.concatenate((sequence.block_hashes, names))

    def so_far(self) -> None:
        """Do nothing: every step is delivered at its end."""

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        self.scheduler.check()

    def _compute_s(self, new_tokens: int, cached_tokens: int) -> float:
        return self._pace.factor * self._latency.prefill_s(new_tokens, cached_tokens)

    async def _make_kv(self, pool: BlockPool, runner: RunnerInfo) -> KvManager | None:  # noqa: ARG002 - sizes are those given
        return timed_kv_manager(pool, self._lower_tiers, self._latency, self._pace, self._wake.set)
