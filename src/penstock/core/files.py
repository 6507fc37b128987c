"""Files: written atomically, and read again when they change."""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.log import get_logger

_MODE = 0o644
RELOAD_S = 2.0
"""How often files are looked at."""
_log = get_logger()


def check_writable(path: Path, *, flag: str) -> None:
    """Check that `write_whole` can write `path`, before starting the work whose result goes there.

    Raises:
        ConfigError: the directory is missing or not writable, or `path` is a directory.
    """
    if path.is_dir():
        raise ConfigError(f"{flag}: {path} is a directory; expected a file")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag}: {path}: cannot be written: {(error.strerror or str(error)).lower()}"
        ) from error


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see the old content or the new content, also if this is interrupted.

    Raises:
        OSError: the directory is not writable or the disk is full; the old file stays, no temporary file is left.
    """
    with _written(path, data, _MODE) as new:
        new.replace(path)


def write_new(path: Path, data: bytes) -> None:
    """Create a private file atomically; a file that is there stays, also one that comes meanwhile.

    Raises:
        OSError: the directory is not writable or the disk is full; no temporary file is left.
    """
    with _written(path, data, 0o600) as new, contextlib.suppress(FileExistsError):
        os.link(new, path)


@contextlib.contextmanager
def _written(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    """Write a temporary file beside `path`; it is gone afterwards, whatever happens."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(descriptor)
    new = Path(name)
    try:
        new.write_bytes(data)
        new.chmod(mode)
        yield new
    finally:
        new.unlink(missing_ok=True)


class WatchedFiles:
    """Tells when one of some files has changed. One event loop owns it."""

    def __init__(self, *files: str | Path) -> None:
        """Remember the files as they are now; read them after this, so that no change between the two is missed."""
        self._files = [Path(file).expanduser() for file in files]
        self._seen = self._look()
        self._looks_missed = 0

    def changed(self) -> bool:
        """Tell whether they differ from when this was last true; not while one of them is away, which is logged once."""
        found = self._look()
        if found is None:
            self._missed()
            return False
        self._looks_missed = 0
        if found == self._seen:
            return False
        self._seen = found
        return True

    async def watch(self, reload: Callable[[], None]) -> None:
        """Call `reload` every `RELOAD_S`, for ever."""
        while True:
            await asyncio.sleep(RELOAD_S)
            reload()

    def _missed(self) -> None:
        """Log files that are away at a second look: one that is being replaced may be away for a moment."""
        self._looks_missed += 1
        if self._looks_missed == 2:
            away = [str(file) for file in self._files if _state(file) is None]
            _log.error(
                "watched_file_missing",
                files=away,
                fix="put it back; until then what was read from it is used",
            )

    def _look(self) -> list[tuple[int, int, int]] | None:
        """Give what changes with the files; None while one of them is away."""
        found = [state for file in self._files if (state := _state(file)) is not None]
        return found if len(found) == len(self._files) else None


def _state(file: Path) -> tuple[int, int, int] | None:
    """Give what changes with a file; of the one behind a link, as Kubernetes replaces a directory behind one."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
