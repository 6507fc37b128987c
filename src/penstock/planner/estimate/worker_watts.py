"""What a worker draws under load, measured: the price of a budget in watts."""

import math
from collections.abc import Iterable, Mapping

from penstock.core.types.instances import Role
from penstock.planner.observe.observation import WorkerView

_BUSY = 0.5
"""Share of the time that a GPU computes; at less, a worker draws less than it may soon."""
_SAMPLES_MIN = 12
_STEP_WATTS = 10
"""Prices go up in such steps: equal prices give equal decisions."""


class WorkerWatts:
    """Watts of one worker of each role: the data sheet's until a busy worker was measured, then the most that one drew.

    The data sheet counts the host too, NVML does not: what it says beyond the GPUs' own limit is added. One task owns it.
    """

    def __init__(self, sheet: Mapping[Role, float]) -> None:
        """Begin with the data sheet's watts of a worker of each role."""
        self._sheet = dict(sheet)
        self._most = dict.fromkeys(sheet, 0.0)
        self._samples = dict.fromkeys(sheet, 0)

    def learn(self, workers: Iterable[WorkerView]) -> None:
        """Take what workers drew over the last seconds."""
        for worker in workers:
            gpu = worker.gpu
            if gpu is None or gpu.utilization < _BUSY or worker.role not in self._sheet:
                continue
            host = max(0.0, self._sheet[worker.role] - gpu.limit_watts)
            self._samples[worker.role] += 1
            self._most[worker.role] = max(self._most[worker.role], gpu.watts + host)

    @property
    def measured(self) -> dict[Role, float]:
        """The watts of a worker of each role that was measured for long enough."""
        return {
            role: float(math.ceil(watts / _STEP_WATTS) * _STEP_WATTS)
            for role, watts in self._most.items()
            if self._samples[role] >= _SAMPLES_MIN
        }
