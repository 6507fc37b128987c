"""The process groups of a deployment in a file, so that they can be ended when its supervisor and its guard were both killed."""

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

_NAME = "groups"
_PROC = Path("/proc")
_GROUP_FIELD, _START_FIELD = 2, 19  # of /proc/PID/stat, behind the command


def start_of(pid: int) -> int | None:
    """Give the start time of a process in clock ticks since the machine's start; None where it has ended."""
    found = _stat(pid)
    return None if found is None else found[1]


def keep_groups(directory: Path, groups: Mapping[int, int | None]) -> None:
    """Write process groups with the start times of their leaders; a failure is ignored, as the guard knows them too."""
    with contextlib.suppress(OSError):
        new = directory / f".{_NAME}"
        new.write_text("".join(f"{group} {start}\n" for group, start in groups.items() if start is not None))
        new.replace(directory / _NAME)


def living_groups(directory: Path) -> list[int]:
    """List the groups of the file that still have processes. A group whose number another program has now is not among them."""
    kept: dict[int, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (directory / _NAME).read_text().splitlines():
            group, start = line.split()
            kept[int(group)] = int(start)
    living = set()
    for pid in _pids():
        found = _stat(pid)
        if found is not None and found[0] in kept:
            leader = start_of(found[0])
            if leader is None or leader == kept[found[0]]:  # no process gets the number of a group that lives
                living.add(found[0])
    return sorted(living)


def end_groups(directory: Path) -> int:
    """Kill the processes of all groups of the file; returns how many groups there were."""
    groups = living_groups(directory)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    return len(groups)


def _pids() -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield from (int(path.name) for path in _PROC.iterdir() if path.name.isdecimal())


def _stat(pid: int) -> tuple[int, int] | None:
    """Give a process's group and start time; None where it has ended, or is a zombie."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else (int(fields[_GROUP_FIELD]), int(fields[_START_FIELD]))
    except (OSError, IndexError, ValueError):
        return None
