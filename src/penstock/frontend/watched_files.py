"""Files that are read again when they change."""

import asyncio
from collections.abc import Callable
from pathlib import Path

RELOAD_S = 2.0
"""How often files are looked at."""


class WatchedFiles:
    """Tells when one of some files has changed. One event loop owns it."""

    def __init__(self, *files: str | Path) -> None:
        """Remember the files as they are now; read them after this, so that no change between the two is missed."""
        self._files = [Path(file).expanduser() for file in files]
        self._seen = self._look()

    def changed(self) -> bool:
        """Tell whether they differ from when this was last true; not while one of them is away."""
        found = self._look()
        if found is None or found == self._seen:
            return False
        self._seen = found
        return True

    async def watch(self, reload: Callable[[], None]) -> None:
        """Call `reload` every `RELOAD_S`, for ever."""
        while True:
            await asyncio.sleep(RELOAD_S)
            reload()

    def _look(self) -> list[tuple[int, int, int]] | None:
        """Give what changes with the files; of the files behind links, as Kubernetes replaces a directory behind one."""
        try:
            found = [file.stat() for file in self._files]
        except OSError:
            return None
        return [(status.st_mtime_ns, status.st_ino, status.st_size) for status in found]
