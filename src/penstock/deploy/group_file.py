"""The process groups of a deployment: their end, and the file by which they end when supervisor and guard were both killed.

Run by its path it is the guard, and so it imports nothing of the package. Standard input has lines: `+GROUP` for a group that has
started, `-GROUP` for one that has ended. At the end of the input the supervisor is gone: the kernel has killed its children, and
this process kills the remaining groups.

Killed engine processes leave shared memory in /dev/shm: Python's own segments, `psm_...`, as vLLM's message queues. Python removes
them by a process of the engine's group, which a kill of the group ends too.
"""

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

_NAME = "groups"
_PROC = Path("/proc")
_SEGMENT = re.compile(rb"/dev/shm/psm_[0-9a-f]+$", re.MULTILINE)
_LOOKS, _LOOK_S = 20, 0.05
"""Killed processes end within milliseconds; those that free gigabytes, within a second."""
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
    remove_unused(kill_groups(groups))
    return len(groups)


def kill_groups(groups: Iterable[int]) -> frozenset[str]:
    """Kill all processes of some groups; returns the segments that these had, for `remove_unused`."""
    segments = segments_of(wanted := set(groups))
    for group in wanted:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    return segments


def segments_of(groups: Collection[int]) -> frozenset[str]:
    """List the paths of the segments that processes of these groups have mapped."""
    return frozenset().union(*(_mapped(pid) for pid in _pids() if _group_of(pid) in groups))


def remove_unused(segments: frozenset[str]) -> None:
    """Remove segments once no process of this machine has mapped them; those that others use for a second stay."""
    for _ in range(_LOOKS):
        if not segments:
            break
        used = frozenset().union(*(_mapped(pid) for pid in _pids()))
        for path in segments - used:
            with contextlib.suppress(OSError):
                Path(path).unlink()
        if segments := segments & used:
            time.sleep(_LOOK_S)


def _group_of(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return None


def _mapped(pid: int) -> frozenset[str]:
    with contextlib.suppress(OSError):
        return frozenset(map(os.fsdecode, _SEGMENT.findall((_PROC / str(pid) / "maps").read_bytes())))
    return frozenset()


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


def _guard() -> None:
    """Read lines until the end of input, then kill the groups left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Against SIGTERM and SIGHUP to a whole session, which is the supervisor's: the guard ends last.
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    remove_unused(kill_groups(groups))


if __name__ == "__main__":
    _guard()
