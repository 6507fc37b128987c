"""Lines of a planner's log."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.wire import Wire
from penstock.planner.explain.record import DecisionRecord

LINE_BYTES_MAX = 4 << 20
_TIME_S_MAX = 253_370_764_800.0
"""The year 9999 begins; Python knows no date after it."""
_DAMAGED_MAX = 100
"""A file that begins with so many lines of another kind is no log."""


class Run(Wire, frozen=True, tag="run"):
    """A planner begins, or its log goes on in a new file.

    Attributes:
        time_s: Unix time, as in `Round`.
        version: Penstock's.
        graph: the deployment's graph; empty where there is none.
        model_dir: directory of its checkpoint.
        continues: rounds of this run were in an older file.
    """

    time_s: float
    version: str
    graph: dict[str, Any] = msgspec.field(default_factory=dict)
    model_dir: str = ""
    continues: bool = False


class Round(Wire, frozen=True, tag="round"):
    """A round of the planner.

    Attributes:
        like_before: rounds between the one in the line above and this one; they came to the same result as the one above.
    """

    time_s: float
    record: DecisionRecord
    like_before: int = 0


Entry = Run | Round
_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


def older(path: Path) -> Path:
    """Give the file that a log's older lines are in."""
    return path.with_name(f"{path.name}.1")


def decode(line: bytes) -> Entry | None:
    """Read a line; None if it is damaged, or does not end as its writer was killed."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = _decoder.decode(line)
    except msgspec.DecodeError:
        return None
    return entry if 0 <= entry.time_s <= _TIME_S_MAX else None


def read_entries(path: Path) -> Iterator[Entry]:
    """Yield the lines of a log, those of its older file first; skips damaged lines.

    Raises:
        ConfigError: the file cannot be read, or has no line of a planner's log.
    """
    damaged = found = 0
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("rb"))]
            if older(path).exists():
                files.insert(0, stack.enter_context(older(path).open("rb")))
            for file in files:
                while line := file.readline(LINE_BYTES_MAX):
                    entry = decode(line)
                    if entry is None:
                        damaged += bool(line.strip())
                        if not found and damaged >= _DAMAGED_MAX:
                            raise _no_log(path, damaged)
                        continue
                    found += 1
                    yield entry
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    if damaged and not found:
        raise _no_log(path, damaged)


def _no_log(path: Path, damaged: int) -> ConfigError:
    return ConfigError(
        f"{path}: no line of a planner's log in {damaged} lines; expected a file planner.jsonl of a deployment"
    )
