"""What the processes of a deployment print: in a log file that is renamed when it is full, and on the terminal.

A reader of this process's output that stands still, such as a stopped terminal, loses lines. Neither a child nor the supervisor's event
loop waits for the reader. The log has all lines.
"""

import contextlib
import io
import os
import selectors
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

NAME_WIDTH = 11
_HALF_BYTES = 16 << 20
_MODE = 0o600


def before(path: Path) -> Path:
    """Give the path of the older half of a log."""
    return path.with_name(f"{path.name}.1")


class LogFile:
    """Lines with their time and the process that printed them. Its methods may be called in any thread."""

    def __init__(self, path: Path, half_bytes: int = _HALF_BYTES) -> None:
        """Append to a file; what cannot be written is lost, and nothing waits for it.

        Args:
            path: the newer half of the log.
            half_bytes: size at which it becomes the older half.
        """
        self.path = path
        self._half_bytes = half_bytes
        self._lock = threading.Lock()
        self._file = _open(path)
        self._size = 0 if self._file is None else self._file.tell()

    def write(self, name: str, lines: list[str]) -> None:
        """Append lines that process `name` has printed now."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")  # the user's clock, as in the lines of structlog
        data = "".join(f"{stamp} {name:<{NAME_WIDTH}} {line}\n" for line in lines).encode(errors="replace")
        with self._lock:
            if self._file is None:
                return
            try:
                if self._size + len(data) > self._half_bytes and self._size:
                    self._file.close()
                    self.path.replace(before(self.path))
                    self._file = _open(self.path)
                    self._size = 0
                if self._file is not None:
                    self._file.write(data)
                    self._size += len(data)
            except OSError:
                self._size += len(data)  # a full disk: later lines may find room

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def _open(path: Path) -> FileIO | None:
    try:
        path.touch(_MODE)
        return path.open("ab", buffering=0)
    except OSError:
        return None


_READ_BYTES = 1 << 16
_LINE_BYTES_MAX = 1 << 16
_HOLD_S = 0.05
_LAST_S = 1.0
"""How long the output of processes that have ended is waited for; a process that left its group may hold a pipe open."""
STDOUT, STDERR = 1, 2
_UNREAD_BYTES_MAX = 1 << 20


@dataclass(slots=True)
class _Pipe:
    """One output of one process."""

    source: "OutputSource"
    target: int
    rest: bytearray = field(default_factory=bytearray)
    """A line whose end has not come."""
    held: bytearray = field(default_factory=bytearray)
    """Bytes that were not passed on yet, so that lines of two processes do not mix."""


@dataclass(slots=True)
class OutputSource:
    """A process that prints; `name` may change, as when a spare process becomes a worker."""

    name: str
    ends: tuple[int, ...] = ()
    """Descriptors that the process gets as its stdout and stderr; closed here once it has started."""

    def close(self) -> None:
        """Close this process's copies of them."""
        ends, self.ends = self.ends, ()
        for end in ends:
            os.close(end)


class ProcessOutput:
    """The outputs of a deployment's processes, within its context."""

    def __init__(self) -> None:
        """Keep no lines until `log` is set."""
        self.log: LogFile | None = None
        self._selector = selectors.DefaultSelector()
        self._wake: int = -1
        self._thread: threading.Thread | None = None
        self._pipes: set[int] = set()
        self._held: dict[int, _Pipe] = {}
        self._lock = threading.Lock()
        self._printers: dict[int, _Printer] = {}

    def __enter__(self) -> Self:
        self._printers = {target: _Printer(target) for target in (STDOUT, STDERR)}
        wake, self._wake = os.pipe()
        self._selector.register(wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, args=(wake,), name="process output", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._thread is not None, "entered"
        os.close(self._wake)
        self._thread.join(2 * _LAST_S)
        printers, self._printers = self._printers, {}
        for printer in printers.values():
            printer.close()
        if self.log is not None:
            self.log.close()

    def note(self, name: str, line: str) -> None:
        """Keep a line of this process itself, which prints it too."""
        if self.log is not None:
            self.log.write(name, [line])

    def print(self, text: str, target: int = STDOUT) -> None:
        """Print text of this process itself; outside the context it waits for the reader."""
        self._pass_on(target, text.encode(errors="backslashreplace"))

    def tee(self, name: str) -> TextIO:
        """Give a stream for this process's own log, whose lines go to stderr and are kept under the name."""
        return _Tee(self, name)

    def source(self, name: str) -> OutputSource:
        """Make the outputs of a process that is about to start; raises OSError where there are no descriptors left."""
        source, ends = OutputSource(name), []
        try:
            for target in (STDOUT, STDERR):
                reader, writer = os.pipe()
                ends.append(writer)
                os.set_blocking(reader, False)
                with self._lock:
                    self._pipes.add(reader)
                self._selector.register(reader, selectors.EVENT_READ, _Pipe(source, target))
        finally:
            source.ends = tuple(ends)
        return source

    def _run(self, wake: int) -> None:
        """Read until the context is left and every process has closed its outputs."""
        end_s: float | None = None
        while end_s is None or (self._pipes and _now_s() < end_s):
            patience_s = None if end_s is None else _LAST_S
            ready = self._selector.select(_HOLD_S if self._held else patience_s)
            if not ready:
                self._pass_on_held()
            for key, _ in ready:
                if key.data is None:
                    self._selector.unregister(wake)
                    end_s = _now_s() + _LAST_S
                else:
                    self._take(key.fd, key.data)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._end(key.fd, key.data)
        os.close(wake)
        self._selector.close()

    def _take(self, descriptor: int, pipe: _Pipe) -> None:
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(descriptor, pipe)
            return
        self._show(pipe, data)
        *lines, rest = (bytes(pipe.rest) + data).split(b"\n")
        if len(rest) > _LINE_BYTES_MAX:
            lines, rest = [*lines, rest], b""
        pipe.rest[:] = rest
        self._keep(pipe, lines)

    def _show(self, pipe: _Pipe, data: bytes) -> None:
        """Pass whole lines on; a progress bar's end with a carriage return. The rest waits for its end, for a moment."""
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if cut or len(pipe.held) > _LINE_BYTES_MAX:
            self._pass_on(pipe.target, bytes(pipe.held) + data[:cut])
            pipe.held[:] = data[cut:]
        else:
            pipe.held += data
        if pipe.held:
            self._held[id(pipe)] = pipe
        else:
            self._held.pop(id(pipe), None)

    def _pass_on_held(self) -> None:
        for pipe in self._held.values():
            self._pass_on(pipe.target, bytes(pipe.held))
            pipe.held.clear()
        self._held.clear()

    def _pass_on(self, target: int, data: bytes) -> None:
        if printer := self._printers.get(target):
            printer.put(data)
        else:
            _write(target, data)

    def _end(self, descriptor: int, pipe: _Pipe) -> None:
        self._keep(pipe, [bytes(pipe.rest)] if pipe.rest else [])
        self._pass_on(pipe.target, bytes(pipe.held))
        self._held.pop(id(pipe), None)
        self._selector.unregister(descriptor)
        with self._lock:
            self._pipes.discard(descriptor)
        os.close(descriptor)

    def _keep(self, pipe: _Pipe, lines: list[bytes]) -> None:
        """Keep lines. A progress bar overwrites its line: only its last text is kept."""
        if self.log is not None and lines:
            shown = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines)
            self.log.write(pipe.source.name, [line.decode(errors="replace") for line in shown])


class _Tee(io.TextIOBase, TextIO):
    """Passes text on, and keeps its lines; a `write` has no part of a line."""

    def __init__(self, output: ProcessOutput, name: str) -> None:
        self._output, self._process = output, name

    def write(self, text: str, /) -> int:
        for line in filter(None, text.splitlines()):  # `print` writes the line's end by itself
            self._output.note(self._process, line)
        self._output.print(text, STDERR)
        return len(text)

    def isatty(self) -> bool:
        return False  # the file has no colours


def _now_s() -> float:
    return time.monotonic()  # noqa: TID251 - a thread has no loop


class _Printer:
    """Writes to one descriptor from a thread of its own. While the reader stands still it keeps up to 1 MiB, and drops what is more."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._parts: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_dropped = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="printer", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Print, now or once the reader takes what came before; never waits."""
        with self._changed:
            is_full = self._num_bytes + len(data) > _UNREAD_BYTES_MAX
            if is_full or (self._num_dropped and self._parts):  # until the reader goes on: one gap, not many
                self._num_dropped += data.count(b"\n")
                return
            if self._num_dropped:
                data = (
                    b"penstock: %d lines are not shown here: nothing read this output; `penstock logs` has them\n%b"
                    % (
                        self._num_dropped,
                        data,
                    )
                )
                self._num_dropped = 0
            self._parts.append(data)
            self._num_bytes += len(data)
            self._changed.notify()

    def close(self) -> None:
        """Print what is left; a reader that stands still has a second for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_LAST_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._parts or self._is_closed)
                if not self._parts:
                    return
                data = b"".join(self._parts)
                self._parts.clear()
                self._num_bytes = 0
            _write(self._target, data)


def _write(target: int, data: bytes) -> None:
    """Write to this process's own output; nothing where that is closed."""
    view = memoryview(data)
    with contextlib.suppress(OSError):
        while view:
            view = view[os.write(target, view) :]
