"""A small process that kills the process groups of a deployment if the supervisor is killed.

The kernel kills the supervisor's children with it, but not their children: an engine's would keep GPU memory. While the
supervisor lives, it kills groups itself.
"""

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.core.log import get_logger
from penstock.deploy import group_file
from penstock.deploy.group_file import keep_groups, start_of

_AGAIN_S = 1.0
_log = get_logger()


class GroupGuard:
    """The guard of one deployment. It runs within its context and is restarted when it ends. One event loop owns it."""

    def __init__(self) -> None:
        """Create the guard; entering its context starts it."""
        self._groups: dict[int, int | None] = {}
        """Start time of each group's leader."""
        self.directory: Path | None = None
        """Where the groups are written too, for `penstock down` after a kill of this process and of the guard; None: nowhere."""
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
        """The guard's process id; None while it restarts."""
        return None if self._process is None else self._process.pid

    def add(self, group: int) -> None:
        """Kill a process group if this process ends before `remove`."""
        self._groups[group] = start_of(group)
        self._write(f"+{group}\n")
        self._keep_file()

    def remove(self, group: int) -> None:
        """Forget a group that has ended."""
        self._groups.pop(group, None)
        self._write(f"-{group}\n")
        self._keep_file()

    def _keep_file(self) -> None:
        if self.directory is not None:
            keep_groups(self.directory, self._groups)

    async def _keep(self) -> None:
        while True:
            if self._process is not None:
                await self._process.wait()
                _log.warning("group_guard_ended", status=self._process.returncode)
                self._process = None
            await asyncio.sleep(_AGAIN_S)
            with contextlib.suppress(OSError):  # no process or memory available now
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
        str(Path(group_file.__file__)),
        stdin=asyncio.subprocess.PIPE,
        preexec_fn=os.setpgrp,  # against signals to this process's group; no session of its own, see `Child.spawn`
    )
