"""Spare processes that have imported a worker's modules, for fast restarts: importing often takes longer than loading a small model."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from penstock.core.log import get_logger
from penstock.deploy.messages import Assignment
from penstock.deploy.supervisor.child import Child
from penstock.deploy.supervisor.group_guard import GroupGuard
from penstock.deploy.supervisor.output.process_output import ProcessOutput

_log = get_logger()


class SpareProcesses:
    """The spare processes of one deployment; all end with its context. One event loop owns it."""

    def __init__(self, count: int, imports: Sequence[str], guard: GroupGuard, output: ProcessOutput) -> None:
        """Create the pool; `refill` starts the processes.

        Args:
            count: number of spare processes.
            imports: modules that each imports.
            guard: kills them if this process dies first.
            output: takes what they print.
        """
        self._count = count
        self._imports = tuple(imports)
        self._guard = guard
        self._output = output
        self._waiting: list[Child] = []
        self._starting = 0
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._running:
            task.cancel()
        await self._tasks.__aexit__(None, None, None)

    def __len__(self) -> int:
        """Count spare processes, ready or importing."""
        return len(self._waiting)

    def refill(self) -> None:
        """Start missing spare processes. Call it when no other process starts: imports keep a core busy for seconds."""
        for _ in range(self._count - len(self._waiting) - self._starting):
            self._starting += 1
            task = self._tasks.create_task(self._keep())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def start(self, assignment: Assignment) -> Child:
        """Assign a spare process to a worker, or start a new one."""
        while self._waiting:
            child = self._waiting.pop(0)
            if not child.has_ended:
                child.assign(assignment)
                return child
        return await Child.start(assignment, self._guard, self._output)

    async def _keep(self) -> None:
        try:
            child = await Child.spare(self._guard, self._output, self._imports)
        except OSError as error:
            _log.warning("spare_not_started", error=str(error), effect="restarts take as long as starts")
            return
        finally:
            self._starting -= 1
        self._waiting.append(child)
        try:
            await child.wait()
        finally:
            if child in self._waiting:
                self._waiting.remove(child)
                child.kill_at_once()
                await child.wait()
