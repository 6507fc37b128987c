"""Atomic file writes."""

import tempfile
from pathlib import Path

from penstock.core.errors import ConfigError

_MODE = 0o644


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
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            Path(file.name).chmod(_MODE)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
