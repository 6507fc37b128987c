"""One child process, seen from its supervisor."""

import asyncio
import os
import signal
import socket
import sys

import msgspec

from penstock.deploy.messages import Assignment, FrontendJob, Report

_REPORT_BYTES_MAX = 1 << 20
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
    """A running process. One task owns it; `signal` and `kill` may come from anywhere on its event loop."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, assignment: Assignment) -> "Child":
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
                    "penstock.deploy.process",
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C is the supervisor's to handle
                    env=_environment(assignment),
                )
            except BaseException:
                writer.close()
                raise
        writer.write(msgspec.json.encode(assignment) + b"\n")
        return cls(process, reader, writer)

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
        """Wait for its end, and return its exit status (negative: the signal that ended it)."""
        status = await self._process.wait()
        self._writer.close()
        return status

    def signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it in a moment: told once more, a frontend that drains still ends its streams with an error.

        It is told several times, for a signal that comes before the last one was taken is lost.
        """
        self.signal(signal.SIGTERM)
        loop = asyncio.get_running_loop()
        for number in range(1, _TOLD_TIMES):
            loop.call_later(number * _LAST_WORD_S / _TOLD_TIMES, self.signal, signal.SIGTERM)
        loop.call_later(_LAST_WORD_S, self.signal, signal.SIGKILL)


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
