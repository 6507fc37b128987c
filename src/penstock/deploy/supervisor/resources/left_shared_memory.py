"""Shared memory that killed engine processes leave in /dev/shm: Python's own segments, `psm_...`, as vLLM's message queues.

Python removes them by a process of the engine's group, which a kill of the group ends too.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_SEGMENT = re.compile(rb"/dev/shm/psm_[0-9a-f]+$", re.MULTILINE)


def segments_of(group: int) -> frozenset[str]:
    """List the paths of the segments that processes of a group have mapped."""
    return frozenset().union(*(_mapped(pid) for pid in _pids() if _group_of(pid) == group))


def remove_unused(segments: frozenset[str]) -> None:
    """Remove those that no process of this machine has mapped any more."""
    if segments:
        for path in segments - frozenset().union(*(_mapped(pid) for pid in _pids())):
            with contextlib.suppress(OSError):
                Path(path).unlink()


def _pids() -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield from (int(path.name) for path in _PROC.iterdir() if path.name.isdecimal())


def _group_of(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return None


def _mapped(pid: int) -> frozenset[str]:
    with contextlib.suppress(OSError):
        return frozenset(map(os.fsdecode, _SEGMENT.findall((_PROC / str(pid) / "maps").read_bytes())))
    return frozenset()
