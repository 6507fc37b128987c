"""Results that survive an interruption: one JSON line for each finished run, appended and synced."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from penstock.core.errors import ConfigError

Figures = dict[str, float]


class Ledger:
    """What is known, by key. One process owns the file; without one, nothing survives."""

    def __init__(self, path: Path | None) -> None:
        """Read what is there; a last line that was cut off is dropped from the file.

        Raises:
            ConfigError: the file cannot be used, or is something else.
        """
        self._path = path
        self._known: dict[str, Figures] = {}
        if path is None:
            return
        try:
            with path.open(
                "a+b"
            ) as file:  # so that one that cannot be written is known before anything is played
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
        """Keep a result; once this returns, it is on the disk."""
        self._known[key] = figures
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(json.dumps({"key": key, "figures": figures}).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

    def forget(self, is_stale: Callable[[str], bool]) -> Self:
        """Drop results by key, also from the file: it is replaced at once by one without them."""
        kept = {key: figures for key, figures in self._known.items() if not is_stale(key)}
        if self._path is not None and len(kept) < len(self._known):
            beside = self._path.with_name(self._path.name + ".new")
            rows = (json.dumps({"key": key, "figures": figures}) + "\n" for key, figures in kept.items())
            beside.write_text("".join(rows), encoding="utf-8")
            beside.replace(self._path)
        self._known = kept
        return self
