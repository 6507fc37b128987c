"""Files that appear whole or not at all."""

import tempfile
from pathlib import Path

from penstock.core.errors import ConfigError

_MODE = 0o644


def check_writable(path: Path, *, flag: str) -> None:
    """Find out whether `write_whole` will work, before the work whose result it keeps.

    Raises:
        ConfigError: there is no such directory, it takes no files, or `path` is a directory.
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
    """Put a file in place in one step: whoever reads it, or interrupts this, finds the old one or the new one.

    Raises:
        OSError: the directory takes no file, or the disk is full; nothing is left of the new one.
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
