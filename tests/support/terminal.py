"""A command in a terminal of its own, to type into and to read."""

import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_PATIENCE_S = 60.0


class Terminal:
    """A running command and what it said."""

    def __init__(self, command: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._own, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, 140))
        self._process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"},
            start_new_session=True,
        )
        os.close(theirs)
        self.said = ""

    def until(self, text: str) -> str:
        """Read until a text comes; returns what came before it."""
        until_s = time.monotonic() + _PATIENCE_S
        while text not in self.said:
            ready, _, _ = select.select([self._own], [], [], max(until_s - time.monotonic(), 0))
            assert ready, f"never said {text!r}: {self.said[-2000:]}"
            self.said += os.read(self._own, 65536).decode(errors="replace")
        before, _, self.said = self.said.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def code(self) -> int:
        """Wait for the command's end."""
        while self._process.poll() is None:  # what it still says must be read, or it waits
            ready, _, _ = select.select([self._own], [], [], 0.05)
            if ready:
                try:
                    os.read(self._own, 65536)
                except OSError:
                    break
        return self._process.wait(timeout=_PATIENCE_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._own)


@contextmanager
def terminal(*command: str, environment: Mapping[str, str] = os.environ) -> Iterator[Terminal]:
    """Run a command until the block ends."""
    opened = Terminal(command, environment)
    try:
        yield opened
    finally:
        opened.close()
