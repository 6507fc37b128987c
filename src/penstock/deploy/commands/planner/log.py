"""`penstock planner log` and `why`: what the planner of a running deployment did, or that of a log's file."""

import asyncio
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from penstock.core.clock import wall_time_s
from penstock.core.config import nearest
from penstock.core.errors import ConfigError, Unavailable
from penstock.core.types.instances import Role
from penstock.deploy.commands.planner.text import clock, folded, line, paragraphs
from penstock.deploy.control.deployments import find_deployment
from penstock.deploy.state import PLANNER_LOG, state_dir
from penstock.planner.explain.entries import Entry, Round, Run, decode, read_entries

_POLL_S = 0.2
_RACING = 64
"""More rounds than are written between a follower's beginning and the end of the first reading."""
_TIME = re.compile(r"(?:(\d{4}-\d{2}-\d{2})[T ])?(\d{1,2}):(\d{2})(?::(\d{2}))?")


def find_log(*, name: str | None, url: str | None, part: str | None, file: Path | None) -> Path:
    """Give the file; else that of the running deployment, or of the one called `name` that has ended.

    Raises:
        Unavailable: no deployment runs, or none fits.
        ConfigError: it has no planner, or several run.
    """
    if file is not None:
        return file
    try:
        connector = asyncio.run(find_deployment(name=name, url=url, part=part))
    except Unavailable:
        if (
            name is not None
            and url is None
            and part is None
            and (kept := state_dir(name) / PLANNER_LOG).exists()
        ):
            return kept
        raise
    deployment = connector.deployment
    assert deployment is not None, "it has answered"
    if not deployment.planner_log:
        raise ConfigError(
            f"{deployment.name} at {deployment.url} has no planner; start it with --max-workers N, or planner: in its graph"
        )
    return Path(deployment.planner_log)


def show_log(path: Path, *, last: int, follow: bool, as_json: bool) -> None:
    """Print the last rounds of a log, and with `follow` those that come.

    Raises:
        ConfigError: the file cannot be read, or is no log.
    """
    with ExitStack() as stack:
        follower = stack.enter_context(closing(_Follower(path))) if follow else None
        found = deque(_rounds(read_entries(path)), maxlen=min(max(last, _RACING), sys.maxsize))
        entries = list(found)[-last:]
        _print(_lines(entries, as_json=as_json))
        if follower is None:
            if not entries:
                sys.stderr.write(f"penstock: {path}: no rounds yet\n")
            return
        seen = {(entry.time_s, entry.record.number) for entry in found}  # no order: a clock may be set back
        while True:
            new = [
                entry for entry in _rounds(follower.new()) if (entry.time_s, entry.record.number) not in seen
            ]
            _print(_lines(new, as_json=as_json))
            time.sleep(_POLL_S)


def show_why(path: Path, which: str | None, *, as_json: bool) -> None:
    """Print all about one round.

    Args:
        path: the log.
        which: a round's number, a time, or a role, whose last change is meant; None is the last change of any role.
        as_json: print the log's line.

    Raises:
        ConfigError: `which` is none of them, or is not in the log.
    """
    rounds = list(_rounds(read_entries(path)))
    if not rounds:
        raise ConfigError(f"{path}: no rounds yet")
    role = Role(which) if which in {role.value for role in Role} else None
    entry = _find(rounds, which, role, path)
    if as_json:
        _print([msgspec.json.encode(entry).decode()])
        return
    _print(paragraphs(entry, role))


def _find(rounds: list[Round], which: str | None, role: Role | None, path: Path) -> Round:
    if which is None or role is not None:
        changed = [entry for entry in rounds if _changes(entry, role)]
        known = {each for entry in rounds for each in entry.record.now}
        if role is not None and role not in known:
            raise ConfigError(f"{path}: there is no role {role}; the roles are {', '.join(sorted(known))}")
        return (changed or rounds)[-1]
    if which.isascii() and which.isdecimal():
        return _by_number(rounds, int(which), path)
    if found := _TIME.fullmatch(which):
        return _by_time(rounds, found, which, path)
    roles = [each.value for each in Role]
    raise ConfigError(
        f"{which!r} is no round's number, no time such as 14:05 and no role{nearest(which, roles)}"
    )


def _changes(entry: Round, role: Role | None) -> bool:
    record = entry.record
    if role is None:
        return record.is_change
    wanted = record.target.get(role)
    return record.is_change and wanted is not None and wanted != record.now.get(role)


def _by_number(rounds: list[Round], number: int, path: Path) -> Round:
    """Give the latest round of this number, or the one that it came to the same as."""
    before: Round | None = None
    found = None
    for entry in rounds:
        if entry.record.number == number:
            found = entry
        elif before is not None and before.record.number < number < entry.record.number:
            found = before
        before = entry
    if found is None:
        first, last = rounds[0].record.number, rounds[-1].record.number
        raise ConfigError(f"{path}: there is no round {number}; the log has {first} to {last}")
    return found


def _by_time(rounds: list[Round], found: re.Match[str], which: str, path: Path) -> Round:
    """Give the last round before a time; without a date, of the last 24 hours."""
    date, hour, minute, second = found.groups()
    now = datetime.fromtimestamp(wall_time_s(), tz=UTC).astimezone()
    try:
        day = now if date is None else datetime.fromisoformat(date)
        meant = now.replace(
            year=day.year,
            month=day.month,
            day=day.day,
            hour=int(hour),
            minute=int(minute),
            second=int(second) if second else 59,
            microsecond=999_999,
        )
    except ValueError as error:
        raise ConfigError(f"{which}: no time: {error}") from error
    if date is None and meant > now + timedelta(minutes=1):
        meant -= timedelta(days=1)
    before = [entry for entry in rounds if entry.time_s <= meant.timestamp()]
    if not before:
        raise ConfigError(
            f"{path}: no round before {which}; the log begins at {clock(rounds[0].time_s, with_date=True)}"
        )
    return before[-1]


def _rounds(entries: Iterable[Entry]) -> Iterator[Round]:
    return (entry for entry in entries if isinstance(entry, Round))


def _lines(entries: Iterable[Round], *, as_json: bool) -> Iterator[str]:
    for entry in entries:
        if as_json:
            yield msgspec.json.encode(entry).decode()
            continue
        if before := folded(entry):
            yield before
        yield line(entry)


def _print(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{text}\n" for text in lines))
    sys.stdout.flush()


class _Follower:
    """Reads what is appended to a log from now on, also once another file has taken its place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from error
        self._file.seek(0, 2)
        self._begun = b""

    def new(self) -> Iterator[Run | Round]:
        """Yield the lines since the last call."""
        yield from self._rest()
        try:
            other = self._path.open("rb")
        except OSError:
            return  # between two files, or the deployment has ended and removed its directory
        with other:
            is_same = _identity(other.fileno()) == _identity(self._file.fileno())
        if not is_same:
            yield from self._rest()
            self._file.close()
            self._file, self._begun = self._path.open("rb"), b""
            yield from self._rest()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _rest(self) -> Iterator[Run | Round]:
        *lines, self._begun = (self._begun + self._file.read()).split(b"\n")
        for text in lines:
            if (entry := decode(text + b"\n")) is not None:
                yield entry


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
