"""Figures that survive an interruption: one JSON line for each finished job, appended and synced."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from penstock.core.errors import ConfigError

Figures = dict[str, float]


class Cache:
    """Figures by key. One process owns the file; without a file nothing survives the process. Thread-safe."""

    def __init__(self, path: Path | None) -> None:
        """Read the file, and drop its last line if that was cut off.

        Raises:
            ConfigError: the file cannot be read and written, or has other content.
        """
        self._lock = threading.Lock()
        self._path = path
        self._known: dict[str, Figures] = {}
        if path is None:
            return
        try:
            with path.open("a+b") as file:  # a file that cannot be written fails here, before any job runs
                file.seek(0)
                content = file.read()
            whole, _, rest = content.rpartition(b"\n")
            if rest:
                os.truncate(path, len(content) - len(rest))
            lines = whole.splitlines()
            for line in lines:
                row = json.loads(line)
                self._known[row["key"]] = {name: float(value) for name, value in row["figures"].items()}
        except OSError as error:
            raise ConfigError(f"--state: {path}: cannot be used: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"--state: {path}, line {lines.index(line) + 1}: not a result of this bench: {error}; name another file"
            ) from error

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> Figures | None:
        return self._known.get(key)

    def put(self, key: str, figures: Figures) -> None:
        """Keep figures; once this returns, they are on the disk."""
        self._known[key] = figures
        if self._path is not None:
            with self._lock, self._path.open("ab") as file:
                file.write(json.dumps({"key": key, "figures": figures}).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

    def forget(self, is_stale: Callable[[str], bool]) -> Self:
        """Drop figures by key, also from the file, which is replaced atomically."""
        kept = {key: figures for key, figures in self._known.items() if not is_stale(key)}
        if self._path is not None and len(kept) < len(self._known):
            beside = self._path.with_name(self._path.name + ".new")
            rows = (json.dumps({"key": key, "figures": figures}) + "\n" for key, figures in kept.items())
            beside.write_text("".join(rows), encoding="utf-8")
            beside.replace(self._path)
        self._known = kept
        return self
