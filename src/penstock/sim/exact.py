"""The token-exact engine: the real scheduler and pool, with steps that only take time."""

from penstock.engine.batched import BatchedEngine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduler import SchedulerConfig
from penstock.perf.latency import LatencyModel
from penstock.sim.timing import Pace, TimingRunner


class ExactEngine(BatchedEngine):
    """A `BatchedEngine` on a `TimingRunner`: the oracle of the engine that jumps."""

    def __init__(
        self, latency: LatencyModel, info: RunnerInfo, config: SchedulerConfig, pace: Pace | None = None
    ) -> None:
        """Start nothing.

        Args:
            latency: prices each step.
            info: the simulated model.
            config: the scheduler's.
            pace: the host's; None for one that is never disturbed.
        """
        super().__init__(TimingRunner(latency, info, pace or Pace()), config)

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        self.scheduler.check()
