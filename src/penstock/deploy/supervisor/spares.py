"""Processes that have imported what a worker needs, and wait to be one: a model's libraries take longer to import than many a model to load."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from penstock.core.log import get_logger
from penstock.deploy.messages import Assignment
from penstock.deploy.supervisor.child import Child
from penstock.deploy.supervisor.group_guard import GroupGuard

_log = get_logger()


class SpareProcesses:
    """One deployment's. None is left when its context ends. One event loop owns it."""

    def __init__(self, count: int, imports: Sequence[str], guard: GroupGuard) -> None:
        """Start none; `refill` does.

        Args:
            count: how many are to wait.
            imports: modules that they have imported by then.
            guard: ends them should this process die first.
        """
        self._count = count
        self._imports = tuple(imports)
        self._guard = guard
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
        """Count those that wait, warm or not yet."""
        return len(self._waiting)

    def refill(self) -> None:
        """Start as many as are missing. Call it when nothing else starts: imports keep a core busy for seconds."""
        for _ in range(self._count - len(self._waiting) - self._starting):
            self._starting += 1
            task = self._tasks.create_task(self._keep())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def start(self, assignment: Assignment) -> Child:
        """Give a worker's process: one that waits, else a new one."""
        while self._waiting:
            child = self._waiting.pop(0)
            if not child.has_ended:
                child.assign(assignment)
                return child
        return await Child.start(assignment, self._guard)

    async def _keep(self) -> None:
        try:
            child = await Child.spare(self._guard, self._imports)
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
