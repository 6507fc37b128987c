"""The supervisor's side of one child process."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from penstock.core.log import get_logger
from penstock.deploy import group_file
from penstock.deploy.group_file import keep_groups, kill_groups, remove_unused, start_of
from penstock.deploy.messages import Assignment, FrontendJob, ProcessOrder, Report
from penstock.deploy.supervisor.output import OutputSource, ProcessOutput

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


_REPORT_BYTES_MAX = 1 << 20
_NEWS_BYTES_MAX = 1 << 16
_CLOSE_S = 0.1
_KILL_AFTER_S = 1.0
_SIGTERM_TIMES = 5
_reports: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)

_ONE_THREAD = {
    # One process per core is the unit of parallelism. Two OpenMP threads on a busy 2-core machine ran a model
    # 8 times slower than one (measured); Rust's tokenizers would start a pool for a single prompt.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Child:
    """A running process and its process group. One task owns it; `signal` and `kill` may be called anywhere on its event loop."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        guard: GroupGuard,
        source: OutputSource,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._guard = guard
        self._source = source

    @classmethod
    async def start(cls, assignment: Assignment, guard: GroupGuard, output: ProcessOutput) -> "Child":
        """Start a process and send its assignment; `guard` kills its group if this process dies first, `output` takes what it prints."""
        child = await cls.spawn(guard, output, _environment(assignment), assignment.name)
        child.assign(assignment)
        return child

    @classmethod
    async def spare(cls, guard: GroupGuard, output: ProcessOutput, imports: Sequence[str]) -> "Child":
        """Start a spare process, which imports modules and waits for a worker's assignment."""
        return await cls.spawn(guard, output, _ONE_THREAD | os.environ, "spare", imports)

    @classmethod
    async def spawn(
        cls,
        guard: GroupGuard,
        output: ProcessOutput,
        environment: Mapping[str, str],
        name: str,
        imports: Sequence[str] = (),
    ) -> "Child":
        """Start a process that waits for its assignment; `name` is for its command line and its lines in the log.

        It leads a process group, since the supervisor handles Ctrl-C, but no session: Linux shares the processor between
        sessions first (autogroup), and an engine that polls, as vLLM's does, would not yield to a frontend of another
        session. On two cores frontends waited 14 ms for each turn, and a vLLM worker gave a third of its tokens.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                reader, writer = await asyncio.open_connection(sock=ours, limit=_REPORT_BYTES_MAX)
            except BaseException:
                ours.close()
                raise
            source = None
            try:
                source = output.source(name)
                process = await asyncio.create_subprocess_exec(
                    *command_line(theirs.fileno(), name, imports),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=source.ends[0],
                    stderr=source.ends[1],
                    pass_fds=(theirs.fileno(),),
                    preexec_fn=os.setpgrp,  # one system call; uvloop has no `process_group`
                    env=environment,
                )
            except BaseException:
                writer.close()
                raise
            finally:
                if source is not None:
                    source.close()
        guard.add(process.pid)  # before the assignment: it has no children yet
        return cls(process, reader, writer, guard, source)

    def assign(self, assignment: Assignment) -> None:
        """Send its assignment, once."""
        self._source.name = assignment.name
        self._writer.write(msgspec.json.encode(assignment) + b"\n")

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def report(self) -> Report | None:
        """Wait for the child's next report; None at the end of its socket."""
        try:
            line = await self._reader.readline()
            return _reports.decode(line) if line else None
        except (OSError, ValueError):  # the child died within a line
            return None

    async def wait(self) -> int:
        """Wait for its end and kill its group; returns the exit status, negative for a signal."""
        status = await self._process.wait()
        if not self._writer.is_closing():
            self._writer.close()
            self._kill_group()
            self._guard.remove(self.pid)
            # Orphans may become this process's children (PID 1 of a container): reap them here.
            asyncio.get_running_loop().call_later(_KILL_AFTER_S, _reap_group, self.pid)
            # Where it never read what it was told, the socket ends with an error that asyncio would print.
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._writer.wait_closed()
        return status

    def tell(self, news: ProcessOrder) -> None:
        """Send a message; ignored if the socket is closed or full."""
        if self._writer.transport.get_write_buffer_size() < _NEWS_BYTES_MAX:
            self._writer.write(msgspec.json.encode(news) + b"\n")

    def signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(
                    self.pid, number
                )  # `send_signal` may consume the exit status, and asyncio would wait for ever

    def kill(self) -> None:
        """Send SIGTERM, then SIGKILL: in between, a draining frontend ends its streams with an error.

        SIGTERM is sent several times: a signal sent before the last one was handled is lost.
        """
        self.signal(signal.SIGTERM)
        loop = asyncio.get_running_loop()
        for number in range(1, _SIGTERM_TIMES):
            loop.call_later(number * _KILL_AFTER_S / _SIGTERM_TIMES, self.signal, signal.SIGTERM)
        loop.call_later(_KILL_AFTER_S, self.kill_at_once)

    def kill_at_once(self) -> None:
        """Kill its group by SIGKILL, which also ends a stopped process."""
        if self._process.returncode is None:
            self._kill_group()

    def _kill_group(self) -> None:
        if left := kill_groups(
            [self.pid]
        ):  # looks at every process of the machine: in a thread, for which the loop waits at its end
            asyncio.get_running_loop().run_in_executor(None, remove_unused, left)


def command_line(fd: int, name: str, imports: Sequence[str]) -> list[str]:
    """Give the command line of a child process.

    Args:
        fd: its socket to the supervisor.
        name: what `ps` shows: a worker's or frontend's name, or `spare`.
        imports: modules that it imports at once.
    """
    isolated = "-P"  # no imports from the working directory
    return [sys.executable, isolated, "-m", "penstock.deploy.processes.process", str(fd), name, *imports]


def _reap_group(group: int) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


def _environment(assignment: Assignment) -> dict[str, str]:
    environment = _ONE_THREAD | os.environ
    if isinstance(assignment.job, FrontendJob) and assignment.job.metrics_dir:
        environment["PROMETHEUS_MULTIPROC_DIR"] = (
            assignment.job.metrics_dir
        )  # prometheus_client reads it on import
    return environment


def describe_status(status: int) -> str:
    """Format an exit status."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


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
