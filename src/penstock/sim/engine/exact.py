"""The token-exact engine: the real scheduler and pool, with steps that only take time."""

import numpy as np

from penstock.core.types.instances import EngineInfo
from penstock.core.types.requests import Request
from penstock.engine.batched import BatchedEngine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.perf.latency import LatencyModel
from penstock.sim.engine.tier_copier import TimedTierCopier
from penstock.sim.engine.timing import Pace, TimingRunner
from penstock.sim.workload.prompt import StreamOf


class ExactEngine(BatchedEngine):
    """A `BatchedEngine` on a `TimingRunner`: the oracle of the engine that jumps."""

    def __init__(
        self,
        latency: LatencyModel,
        info: RunnerInfo,
        config: SchedulerConfig,
        pace: Pace | None = None,
        stream_of: StreamOf | None = None,
    ) -> None:
        """Start nothing.

        Args:
            latency: prices each step.
            info: the simulated model.
            config: the scheduler's.
            pace: the host's; None for one that is never disturbed.
            stream_of: names the blocks of what a request is answered; None to hash its tokens.
        """
        pace = pace or Pace()
        self._timed = TimedTierCopier(latency, info.block_size, pace) if info.lower_blocks else None
        super().__init__(TimingRunner(latency, info, pace), config, copier=self._timed)
        self._block_size = info.block_size
        self._stream_of = stream_of

    async def start(self) -> EngineInfo:
        """Do what there is to do, and hand no tokens past a prompt's full blocks over: the engine that jumps does not, either."""
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

    async def close(self) -> None:
        if self._timed is not None:
            self._timed.close()
        await super().close()

    def so_far(self) -> None:
        """Have nothing left to tell: every step is told at its end."""

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        self.scheduler.check()
