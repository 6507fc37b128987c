"""The memory of this machine that can still be taken."""

from pathlib import Path

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_memory_bytes() -> int:
    """Return the free memory of this machine, within the limit of its control group."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = _CONTROL_GROUP
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text()) - _reclaimable_bytes(group)
    except (OSError, ValueError):  # no control groups of version 2, or no limit
        return available
    return min(available, max(0, limit - used))


def _reclaimable_bytes(group: Path) -> int:
    """Return the size of inactive page cache, such as weight files; the kernel drops it when memory is needed."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(fields.get("inactive_file", 0))
