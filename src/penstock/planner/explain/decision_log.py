"""Appends the planner's rounds to a file that does not grow for ever, from a thread: a disk that hangs harms nobody else."""

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from penstock.core.clock import wall_time_s
from penstock.core.log import get_logger
from penstock.planner.explain.entries import Entry, Round, Run, older
from penstock.planner.explain.record import DecisionRecord

_WAITING_MAX = 128
_CLOSE_S = 2.0
_log = get_logger()


class DecisionLog:
    """A log in two files: `path`, and an older one that the full one replaces. One task calls it.

    Rounds that come to the same result as the one before, with nothing to do, are counted and not written until demand is
    forecast anew.
    """

    def __init__(
        self,
        path: Path,
        run: Run,
        *,
        file_bytes_max: int = 8 << 20,
        time_s: Callable[[], float] = wall_time_s,
    ) -> None:
        """Begin with the line of `run`; what cannot be written is logged and counted.

        Args:
            path: the file, in a directory that exists; an existing one is continued.
            run: describes the planner.
            file_bytes_max: a file that would be larger becomes the older one.
            time_s: Unix time.
        """
        self.lost = 0
        """Lines that were not written."""
        self._path = path
        self._run = run
        self._file_bytes_max = file_bytes_max
        self._time_s = time_s
        self._last: DecisionRecord | None = None
        self._like_last = 0
        self._file: int | None = None
        self._is_torn = True
        self._has_failed = False
        self._lines: queue.Queue[bytes | None] = queue.Queue(_WAITING_MAX)
        self._thread = threading.Thread(target=self._write_all, name="planner-log", daemon=True)
        self._thread.start()
        self._offer(run)

    def put(self, record: DecisionRecord) -> None:
        """Take a round."""
        if self._last is not None and not record.is_floor and _is_alike(self._last, record):
            self._like_last += 1
            return
        self._offer(Round(time_s=self._time_s(), record=record, like_before=self._like_last))
        self._last, self._like_last = record, 0

    def close(self) -> None:
        """Write what waits; gives up after two seconds."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _offer(self, entry: Entry) -> None:
        try:
            self._lines.put_nowait(_line(entry))
        except queue.Full:
            self._lose(f"{_WAITING_MAX} lines wait for the disk")

    # -- the thread

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
                self._has_failed = False
            except OSError as error:
                self._close_file()
                self._lose(error.strerror or str(error))
        self._close_file()

    def _write(self, line: bytes) -> None:
        """Append a line, to a new file if need be.

        Raises:
            OSError: the directory is gone, or the disk is full or broken.
        """
        file = self._open()
        if (size := os.fstat(file).st_size) and size + len(line) > self._file_bytes_max:
            self._close_file()
            self._path.replace(older(self._path))
            file, size = self._open(), 0
        if not size and line != _line(self._run):
            line = _line(msgspec.structs.replace(self._run, continues=True)) + line
        if self._is_torn and os.fstat(file).st_size:
            line = b"\n" + line  # the last line may have been written in part
        self._is_torn = True
        while line:
            line = line[os.write(file, line) :]
        self._is_torn = False

    def _open(self) -> int:
        if self._file is not None and not os.fstat(self._file).st_nlink:
            self._close_file()  # somebody has removed it
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._is_torn = True
        return self._file

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None

    def _lose(self, why: str) -> None:
        self.lost += 1
        if not self._has_failed:
            self._has_failed = True
            _log.warning(
                "planner_log_not_written", path=str(self._path), error=why, effect="decisions are not kept"
            )


def _line(entry: Entry) -> bytes:
    return msgspec.json.encode(entry) + b"\n"


def _is_alike(one: DecisionRecord, other: DecisionRecord) -> bool:
    """Tell whether two rounds came to the same result, the workers being as they shall be or waiting to be started."""
    is_done = other.target == {role: other.now[role] for role in other.target}
    return _result(one) == _result(other) and not other.is_change and (is_done or bool(other.waits))


def _result(record: DecisionRecord) -> object:
    decision = record.decision
    return (
        record.outcome,
        record.now,
        record.target,
        record.late,
        record.overdue,
        record.refused,
        bool(record.waits),
        record.is_dry,
        record.room,
        record.rigid,
        None if decision is None else (decision.target, bool(decision.shortfall)),
    )
