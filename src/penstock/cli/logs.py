"""`penstock logs`: what the processes of a deployment have printed, also of one that has ended."""

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from io import FileIO
from pathlib import Path

from penstock.cli.parser import Parser, add_deployment
from penstock.core.config import nearest
from penstock.core.errors import ConfigError, Unavailable
from penstock.deploy.control.hosted import Hosted, choose, hosted
from penstock.deploy.state import OUTPUT_LOG, state_dir
from penstock.deploy.supervisor.output import before

_LINES = 100


def add_logs(parser: Parser) -> None:
    """Add the arguments of `penstock logs`."""
    parser.description = (
        "Show what the processes of a deployment have printed on this host, also of one that has ended. The log keeps"
        " the last 16 to 32 MiB."
    )
    parser.add_argument("process", nargs="?", metavar="PROCESS", help="such as worker-1; without, all")
    parser.add_argument("-n", type=int, default=_LINES, metavar="N", help=f"lines (default {_LINES})")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on until the deployment ends, or Ctrl-C"
    )
    add_deployment(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:

    if options.n < 0:
        raise ConfigError(f"-n: must be >= 0, got {options.n}")
    show_logs(options.process, name=options.name, part=options.part, last=options.n, follow=options.follow)
    return 0


_POLL_S = 0.2
_READ_BYTES = 1 << 20
_STAMP_WORDS = 2
"""Words before the process's name: date and time."""


def show_logs(process: str | None, *, name: str | None, part: str | None, last: int, follow: bool) -> None:
    """Print the last lines, of one process or of all, and with `follow` those that come until the deployment ends.

    Args:
        process: such as `worker-1`; None for all.
        name: the deployment's; None for the only one of this host.
        part: which part of the deployment, where several run here.
        last: lines.
        follow: go on.

    Raises:
        Unavailable: there is no such deployment, or it has printed nothing yet.
        ConfigError: several fit, or the process has printed nothing.
    """
    path, found = find_output(name, part)
    with closing(LogFollower(path)) as follower:
        lines = deque(_of(process, follower.lines()), maxlen=last)
        if process is not None and not lines and last:
            known = sorted({process_of(line) for line in _whole(path)} - {""})
            if process not in known:
                raise ConfigError(f"PROCESS: {process!r} has printed nothing{nearest(process, known)}")
        _write(lines)
        while follow:
            is_over = found is None or not found.still_runs()  # before the last reading
            _write(_of(process, follower.lines()))
            if is_over:
                return
            time.sleep(_POLL_S)


def find_output(name: str | None, part: str | None) -> tuple[Path, Hosted | None]:
    """Give the log of a deployment, and the deployment where it lives.

    Raises:
        Unavailable: there is none.
        ConfigError: several fit.
    """
    living = [each for each in hosted() if each.is_live]
    try:
        found = choose(living, name=name, part=part)
    except Unavailable:
        if name is not None and part is None and (kept := state_dir(name) / OUTPUT_LOG).exists():
            return kept, None
        raise
    if found.record is None or not Path(found.record.log).exists():
        raise Unavailable(f"{found.name}: has printed nothing yet; try again in a moment")
    return Path(found.record.log), found


class LogFollower:
    """Reads whole lines of a log, and goes on in the next file when another file has taken the log's place."""

    def __init__(self, path: Path, *, at_end: bool = False) -> None:
        """Open the log.

        Args:
            path: the log.
            at_end: begin behind the lines that are there; else with those of the file before, if it was kept.

        Raises:
            ConfigError: the log cannot be read.
        """
        self._path = path
        self._rest = b""
        older = before(path)
        try:
            self._file = FileIO(older if not at_end and older.exists() else path)
        except OSError as error:
            raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from error
        if at_end:
            self._file.seek(0, os.SEEK_END)

    def lines(self) -> Iterator[str]:
        """Yield what came since the last time."""
        yield from self._read()
        while (after := self._next()) is not None:
            yield from self._read()  # written before the file was renamed
            self._file.close()
            self._file, self._rest = after, b""
            yield from self._read()

    def close(self) -> None:
        self._file.close()

    def _read(self) -> Iterator[str]:
        while data := self._file.read(_READ_BYTES):
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)

    def _next(self) -> FileIO | None:
        """Open the file that has taken the log's place; None where none has."""
        try:
            after = FileIO(self._path)
        except OSError:
            return None  # between two files, or the deployment has ended and removed its directory
        if os.path.sameopenfile(after.fileno(), self._file.fileno()):
            after.close()
            return None
        return after


def _whole(path: Path) -> Iterator[str]:
    with closing(LogFollower(path)) as follower:
        yield from follower.lines()


def _of(process: str | None, lines: Iterable[str]) -> Iterator[str]:
    wanted: Callable[[str], bool] = lambda line: process is None or process_of(line) == process  # noqa: E731
    return filter(wanted, lines)


def process_of(line: str) -> str:
    """Give the name of the process that printed a line of a deployment's log; empty where it has none."""
    words = line.split(maxsplit=_STAMP_WORDS + 1)
    return words[_STAMP_WORDS] if len(words) > _STAMP_WORDS else ""


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
