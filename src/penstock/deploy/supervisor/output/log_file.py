"""A log of bounded size: when it is full it is renamed, and the one before it goes."""

import threading
import time
from io import FileIO
from pathlib import Path

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
