"""A runner around another one that imitates a device whose writes land late.

On a GPU, kernels are only queued when a forward pass returns. Here blocks that a step wrote keep their old content, for all
readers but the runner's own next step, unless the runner has waited for its fence by the end of the step.
"""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.engine.runner import BlockingRunner, RunnerInfo
from penstock.engine.scheduling.sequences import Sampled, SequenceTable, StepPlan
from penstock.transfer.regions.arena import region_of


class LateFence:
    """A fence that counts its waits."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


class LateRunner:
    """A `BlockingRunner` around another one whose blocks lie in one region."""

    def __init__(self, make_runner: Callable[[LateFence], BlockingRunner]) -> None:
        """Wrap the runner that `make_runner` returns for this device's fence."""
        self._fence = LateFence()
        self._runner = make_runner(self._fence)
        self._blocks: NDArray[np.uint8] = np.zeros((0, 0), np.uint8)
        self._block_size = 1
        self._queued: tuple[NDArray[np.int32], NDArray[np.uint8]] | None = None

    def start(self) -> RunnerInfo:
        info = self._runner.start()
        ((memory,),) = self._runner.kv_memory()
        region = region_of(memory)
        view = (ctypes.c_uint8 * region.size_bytes).from_address(region.address)
        self._blocks = np.ctypeslib.as_array(view).reshape(-1, info.kv_bytes_per_block)
        self._block_size = info.block_size
        return info

    def run(self, plan: StepPlan, table: SequenceTable) -> Sampled:
        if self._queued is not None:
            written, content = self._queued
            self._blocks[written] = content
            self._queued = None
        waits, written = self._fence.waits, self._written(plan, table)
        before = self._blocks[written]
        try:
            return self._runner.run(plan, table)
        finally:
            if self._fence.waits == waits:
                self._queued = written, self._blocks[written]
                self._blocks[written] = before

    def kv_memory(self) -> Sequence[Sequence[object]]:
        return self._runner.kv_memory()

    def close(self) -> None:
        self._blocks = np.zeros((0, 0), np.uint8)
        self._runner.close()

    def _written(self, plan: StepPlan, table: SequenceTable) -> NDArray[np.int32]:
        """List the blocks that a step writes to."""
        start = table.num_computed[plan.slots] // self._block_size
        end = -(-(table.num_computed[plan.slots] + plan.num_new) // self._block_size)
        runs = zip(plan.slots.tolist(), start.tolist(), end.tolist(), strict=True)
        return np.concatenate([table.block_tables[slot, first:last] for slot, first, last in runs])
