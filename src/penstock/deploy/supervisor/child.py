"""One child process, seen from its supervisor."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

import msgspec

from penstock.deploy.messages import Assignment, FrontendJob, ProcessFailed, Report
from penstock.deploy.supervisor.group_guard import GroupGuard

_REPORT_BYTES_MAX = 1 << 20
_NEWS_BYTES_MAX = 1 << 16
_LAST_WORD_S = 1.0
_TOLD_TIMES = 5
_reports: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)

_ONE_THREAD = {
    # Processes are the unit of parallelism here. Two OpenMP threads on a busy 2-core machine ran a model
    # 8 times slower than one (measured); Rust's tokenizers would start a pool for a single prompt.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Child:
    """A running process, and those that it starts: its group. One task owns it; `signal` and `kill` may come from anywhere on its event loop."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        guard: GroupGuard,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._guard = guard

    @classmethod
    async def start(cls, assignment: Assignment, guard: GroupGuard) -> "Child":
        """Start a process and tell it what to do; a guard ends its group should this process die first."""
        child = await cls.spawn(guard, _environment(assignment))
        child.assign(assignment)
        return child

    @classmethod
    async def spare(cls, guard: GroupGuard, imports: Sequence[str]) -> "Child":
        """Start a process that imports modules, then waits for a worker's assignment."""
        return await cls.spawn(guard, _ONE_THREAD | os.environ, imports)

    @classmethod
    async def spawn(
        cls, guard: GroupGuard, environment: Mapping[str, str], imports: Sequence[str] = ()
    ) -> "Child":
        """Start a process that waits for its assignment."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                reader, writer = await asyncio.open_connection(sock=ours, limit=_REPORT_BYTES_MAX)
            except BaseException:
                ours.close()
                raise
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # the working directory is no place to import from
                    "-m",
                    "penstock.deploy.processes.process",
                    str(theirs.fileno()),
                    *imports,
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C is the supervisor's to handle; and a group of its own
                    env=environment,
                )
            except BaseException:
                writer.close()
                raise
        guard.add(process.pid)  # before it knows what to do: it has started nothing
        return cls(process, reader, writer, guard)

    def assign(self, assignment: Assignment) -> None:
        """Tell it what to do, once."""
        self._writer.write(msgspec.json.encode(assignment) + b"\n")

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def report(self) -> Report | None:
        """Wait for what the child says next; None once it can say no more."""
        try:
            line = await self._reader.readline()
            return _reports.decode(line) if line else None
        except (OSError, ValueError):  # it died in the middle of a line
            return None

    async def wait(self) -> int:
        """Wait for its end, and return its exit status (negative: the signal that ended it); whatever it had started ends with it."""
        status = await self._process.wait()
        if not self._writer.is_closing():
            self._writer.close()
            self._kill_group()
            self._guard.remove(self.pid)
            # Where orphans become this process's children, as of a container's first process, nobody else waits for them.
            asyncio.get_running_loop().call_later(_LAST_WORD_S, _reap_group, self.pid)
        return status

    def tell(self, news: ProcessFailed) -> None:
        """Tell it something; a process that does not listen is told no more."""
        if self._writer.transport.get_write_buffer_size() < _NEWS_BYTES_MAX:
            self._writer.write(msgspec.json.encode(news) + b"\n")

    def signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(
                    self.pid, number
                )  # `send_signal` may take the exit status, which asyncio then waits for in vain

    def kill(self) -> None:
        """End it in a moment: told once more, a frontend that drains still ends its streams with an error.

        It is told several times, for a signal that comes before the last one was taken is lost.
        """
        self.signal(signal.SIGTERM)
        loop = asyncio.get_running_loop()
        for number in range(1, _TOLD_TIMES):
            loop.call_later(number * _LAST_WORD_S / _TOLD_TIMES, self.signal, signal.SIGTERM)
        loop.call_later(_LAST_WORD_S, self.kill_at_once)

    def kill_at_once(self) -> None:
        """End it and whatever it has started without a word; a process that is stopped ends too."""
        if self._process.returncode is None:
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _reap_group(group: int) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


def _environment(assignment: Assignment) -> dict[str, str]:
    environment = _ONE_THREAD | os.environ
    if isinstance(assignment.job, FrontendJob) and assignment.job.metrics_dir:
        environment["PROMETHEUS_MULTIPROC_DIR"] = assignment.job.metrics_dir  # read when it is imported
    return environment


def describe_status(status: int) -> str:
    """Word an exit status for people."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
