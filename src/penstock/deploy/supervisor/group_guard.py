"""A small process that ends what a deployment's processes have started, should the supervisor be killed.

The kernel kills the supervisor's children with it, but not theirs: those of an engine would keep its GPU's memory. While the
supervisor lives it ends groups by itself.
"""

import asyncio
import contextlib
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.core.log import get_logger
from penstock.deploy.supervisor import guard_process

_AGAIN_S = 1.0
_log = get_logger()


class GroupGuard:
    """One deployment's. It runs within its context; a guard that ends is replaced. One event loop owns it."""

    def __init__(self) -> None:
        """Start nothing."""
        self._groups: set[int] = set()
        self._process: asyncio.subprocess.Process | None = None
        self._tasks = asyncio.TaskGroup()
        self._keeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._process = await _start()
        await self._tasks.__aenter__()
        self._keeping = self._tasks.create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeping is not None, "entered"
        self._keeping.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await self._end()

    @property
    def pid(self) -> int | None:
        """The guard's process; None between two."""
        return None if self._process is None else self._process.pid

    def add(self, group: int) -> None:
        """Have a process group killed should this process end before `remove`."""
        self._groups.add(group)
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Leave a group alone: it has ended."""
        self._groups.discard(group)
        self._write(f"-{group}\n")

    async def _keep(self) -> None:
        while True:
            if self._process is not None:
                await self._process.wait()
                _log.warning("group_guard_ended", status=self._process.returncode)
                self._process = None
            await asyncio.sleep(_AGAIN_S)
            with contextlib.suppress(OSError):  # no more processes, or no memory, just now
                self._process = await _start()
            self._write("".join(f"+{group}\n" for group in sorted(self._groups)))

    def _write(self, lines: str) -> None:
        if self._process is not None and self._process.stdin is not None and lines:
            self._process.stdin.write(lines.encode("ascii"))

    async def _end(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()
            self._process = None


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        str(Path(guard_process.__file__)),
        stdin=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
