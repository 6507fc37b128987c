"""Host settings that limit transports, with advice on what to change."""

import os
import resource
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock.core.errors import TransferError
from penstock.core.native import native
from penstock.doctor.findings import HostFinding
from penstock.transfer import Arena

_MEMLOCK_LEAST_BYTES = 64 << 20
_FDS_LEAST = 4096
_DEV_SHM_LEAST_BYTES = 1 << 30
_DEV_SHM = "/dev/shm"  # noqa: S108 - only inspected


def inspect_host(root: Path = Path("/")) -> tuple[HostFinding, ...]:
    """Inspect all settings.

    Args:
        root: directory that holds `proc`, `sys` and `dev`.
    """
    found = (_native, _memfd, _dev_shm, _ptrace, _huge_pages, _memlock, _open_files, _cpus, _object_stores)
    return tuple(finding for look in found for finding in look(root))


def _native(_: Path) -> Iterator[HostFinding]:
    advice = (
        "" if native else "copies and lists of ranges are slow: install g++, and without PENSTOCK_NATIVE=OFF"
    )
    yield HostFinding(name="native module", value="on" if native else "off", advice=advice)


def _memfd(_: Path) -> Iterator[HostFinding]:
    try:
        Arena.create(1, prefault=False).close()
    except (TransferError, OSError) as error:
        yield HostFinding(
            name="shared memory (memfd)",
            value=str(error),
            advice="no arenas: permit memfd_create (a seccomp profile forbids it?)",
        )
    else:
        yield HostFinding(name="shared memory (memfd)", value="on")


def _dev_shm(root: Path) -> Iterator[HostFinding]:
    """Arenas do not use it; UCX and torch do."""
    try:
        usage = shutil.disk_usage(root / "dev/shm")
    except OSError as error:
        yield HostFinding(
            name=_DEV_SHM,
            value=error.strerror or "none",
            advice="nixl and torch may want it: mount a tmpfs there",
        )
        return
    advice = (
        "" if usage.total >= _DEV_SHM_LEAST_BYTES else "small for nixl and torch: docker run --shm-size=8g"
    )
    yield HostFinding(name=_DEV_SHM, value=f"{_size(usage.free)} free of {_size(usage.total)}", advice=advice)


def _ptrace(root: Path) -> Iterator[HostFinding]:
    scope = _read(root / "proc/sys/kernel/yama/ptrace_scope")
    meaning, advice = {
        "": ("no restriction", ""),
        "0": ("0: no restriction", ""),
        "1": ("1: a process reaches its descendants only", "private memory of others goes through sockets"),
        "2": ("2: only with CAP_SYS_PTRACE", "private memory goes through sockets without it"),
        "3": ("3: never", "private memory goes through sockets"),
    }.get(scope, (scope, ""))
    if advice:
        advice += ": use arenas, or sysctl kernel.yama.ptrace_scope=0 (after 3 only a reboot helps)"
    yield HostFinding(name="ptrace_scope", value=meaning, advice=advice)


def _huge_pages(root: Path) -> Iterator[HostFinding]:
    path = root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    text = _read(path)
    chosen = text.partition("[")[2].partition("]")[0] or "unknown"
    advice = (
        ""
        if chosen not in {"never", "deny"}
        else f"large arenas are quicker with: echo advise > /{path.relative_to(root)}"
    )
    yield HostFinding(name="huge pages for arenas", value=chosen, advice=advice)


def _memlock(_: Path) -> Iterator[HostFinding]:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    low = 0 <= soft < _MEMLOCK_LEAST_BYTES
    advice = "RDMA and pinned memory need more: ulimit -l unlimited, LimitMEMLOCK=infinity" if low else ""
    yield HostFinding(name="locked memory (ulimit -l)", value=_limit(soft, sized=True), advice=advice)


def _open_files(_: Path) -> Iterator[HostFinding]:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 0 <= soft < _FDS_LEAST
    advice = "a peer over tcp takes up to 17: ulimit -n 65536, LimitNOFILE=65536" if low else ""
    yield HostFinding(name="open files (ulimit -n)", value=_limit(soft, sized=False), advice=advice)


def _cpus(_: Path) -> Iterator[HostFinding]:
    count = len(os.sched_getaffinity(0))
    yield HostFinding(name="CPUs for this process", value=str(count))


def _object_stores(_: Path) -> Iterator[HostFinding]:
    name = "object stores (obstore)"
    try:
        found = version("obstore")
    except PackageNotFoundError:
        yield HostFinding(
            name=name,
            value="not installed",
            advice="kv.object and transfers to stores need it: pip install 'penstock-llm[object]'",
        )
    else:
        yield HostFinding(name=name, value=found)


def _limit(value: int, *, sized: bool) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return _size(value) if sized else str(value)


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
