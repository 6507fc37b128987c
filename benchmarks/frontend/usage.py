"""What a process uses, by /proc."""

import os
import time
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float:
    """Give the CPU seconds of all its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES / 1e6


def anonymous_mb(pid: int) -> float:
    """Give its resident memory without pages of files, which the kernel takes away and reads again as it likes."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "RssAnon" in line)
    return int(line.split()[1]) * 1024 / 1e6


def idle_cpu_share(pid: int, seconds: float) -> float:
    """Give the share of a core that it uses for so long."""
    before_s, began_s = cpu_s(pid), time.perf_counter()
    time.sleep(seconds)
    return (cpu_s(pid) - before_s) / (time.perf_counter() - began_s)


def machine_idle_s() -> float:
    """Give the seconds that all cores together have been idle so far."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(fields[4]) + int(fields[5])) / _TICKS_PER_S
