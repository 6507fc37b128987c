"""Captures what an engine's processes print: logs it at debug level, and finds the reason when a process fails."""

import contextlib
import logging
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator

from penstock.core.log import get_logger, is_debugging

_LINES = 400
_ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Interrupt))(?:: (.+))?$")
_USAGE = re.compile(r"(?:^|\s)error: (.+)$")
"""What argparse says of a command line."""
_CONSEQUENCE = re.compile(
    r"(?i)see (?:the )?(?:root cause|stack trace)|background process|initialization failed"
)
"""Errors that only say that another process had one."""
_log = get_logger()


class PrintedLines:
    """Keeps the last lines that an engine's processes have printed."""

    def __init__(self, engine: str) -> None:
        """Make it; `engine` is the engine's name in the log."""
        self._engine = engine
        self._lines: deque[str] = deque(maxlen=_LINES)

    def forget(self) -> None:
        """Drop the lines so far: the engine has started, so they explain no later failure."""
        self._lines.clear()

    def reason(self) -> str | None:
        """Return the last printed error that was not caused by another one; None if there is none."""
        for line in reversed(self._lines):
            found = _ERROR.search(line)
            if found and not _CONSEQUENCE.search(line):
                return found[2] or found[1]
        usage = (_USAGE.search(line) for line in reversed(self._lines))
        return next((found[1] for found in usage if found), None)

    @property
    def last(self) -> str:
        """The last line that is not empty; "" without one."""
        return next((line.strip() for line in reversed(self._lines) if line.strip()), "")

    def read(self, descriptor: int) -> None:
        """Read lines from a file descriptor to its end, and close it."""
        with os.fdopen(descriptor, errors="replace") as lines:
            for line in lines:
                self.note(line.rstrip())

    def note(self, line: str) -> None:
        self._lines.append(line)
        if is_debugging():  # a log that is not set up goes to stdout, and so comes back here
            _log.debug("engine_printed", engine=self._engine, line=line)


class ChildOutput(PrintedLines):
    """Reads the output of processes that are started within `taken`."""

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Give processes started inside a pipe as stdout and stderr; this process's own log is not captured."""
        reading, writing = os.pipe()
        saved = os.dup(1), os.dup(2)
        sys.stdout.flush()
        own, sys.stderr = sys.stderr, os.fdopen(os.dup(2), "w", buffering=1)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(writing)
        threading.Thread(target=self.read, args=(reading,), daemon=True, name="engine output").start()
        try:
            yield
        finally:
            sys.stdout.flush()
            for descriptor, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)
            meanwhile, sys.stderr = sys.stderr, own
            meanwhile.close()

    def take_log(self, name: str) -> None:
        """Capture a logger of this process too."""
        logger = logging.getLogger(name)
        logger.handlers = [_Lines(self.note)]
        logger.propagate = False


class _Lines(logging.Handler):
    """Gives each line of a record to a function."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note_line = note

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).splitlines():
            self._note_line(line)
