"""The planner's log: its lines, and the thread that appends them to a file of bounded size."""

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.clock import wall_time_s
from penstock.core.errors import ConfigError
from penstock.core.log import get_logger
from penstock.core.wire import Wire
from penstock.planner.record import DecisionRecord

LINE_BYTES_MAX = 4 << 20
_TIME_S_MAX = 253_370_764_800.0
"""The year 9999 begins; Python knows no date after it."""
_DAMAGED_MAX = 100
"""A file that begins with so many lines of another kind is no log."""


class LoggedRun(Wire, frozen=True, tag="run"):
    """A planner begins, or its log goes on in a new file.

    Attributes:
        time_s: Unix time, as in `LoggedRound`.
        version: Penstock's.
        graph: the deployment's graph; empty where there is none.
        model_dir: directory of its checkpoint.
        continues: rounds of this run were in an older file.
    """

    time_s: float
    version: str
    graph: dict[str, Any] = msgspec.field(default_factory=dict)
    model_dir: str = ""
    continues: bool = False


class LoggedRound(Wire, frozen=True, tag="round"):
    """A round of the planner.

    Attributes:
        like_before: rounds between the one in the line above and this one; they came to the same result as the one above.
    """

    time_s: float
    record: DecisionRecord
    like_before: int = 0


Entry = LoggedRun | LoggedRound
_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


def older(path: Path) -> Path:
    """Give the file that a log's older lines are in."""
    return path.with_name(f"{path.name}.1")


def decode(line: bytes) -> Entry | None:
    """Read a line; None if it is damaged, or does not end as its writer was killed."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = _decoder.decode(line)
    except msgspec.DecodeError:
        return None
    return entry if 0 <= entry.time_s <= _TIME_S_MAX else None


def read_entries(path: Path) -> Iterator[Entry]:
    """Yield the lines of a log, those of its older file first; skips damaged lines.

    Raises:
        ConfigError: the file cannot be read, or has no line of a planner's log.
    """
    damaged = found = 0
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("rb"))]
            if older(path).exists():
                files.insert(0, stack.enter_context(older(path).open("rb")))
            for file in files:
                while line := file.readline(LINE_BYTES_MAX):
                    entry = decode(line)
                    if entry is None:
                        damaged += bool(line.strip())
                        if not found and damaged >= _DAMAGED_MAX:
                            raise _no_log(path, damaged)
                        continue
                    found += 1
                    yield entry
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    if damaged and not found:
        raise _no_log(path, damaged)


def _no_log(path: Path, damaged: int) -> ConfigError:
    return ConfigError(
        f"{path}: no line of a planner's log in {damaged} lines; expected a file planner.jsonl of a deployment"
    )


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
        run: LoggedRun,
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
        self._offer(LoggedRound(time_s=self._time_s(), record=record, like_before=self._like_last))
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
