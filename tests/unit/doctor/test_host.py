"""What the doctor says of a host, and how it words what does not work."""

import resource
from pathlib import Path

import pytest

from penstock.doctor import host
from penstock.doctor.findings import (
    LOOPBACK,
    OWN,
    PROCESS,
    Findings,
    HostFinding,
    MemoryFinding,
    PathFinding,
    TransportFinding,
)
from penstock.doctor.tables import absences, paths_table


def found(root: Path) -> dict[str, HostFinding]:
    return {finding.name: finding for finding in host.inspect_host(root)}


def a_root(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_host_without_restrictions_needs_no_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(host, "_DEV_SHM_LEAST_BYTES", 0)
    root = a_root(
        tmp_path,
        proc__sys__kernel__yama__ptrace_scope="0\n",
        sys__kernel__mm__transparent_hugepage__shmem_enabled="always within_size [advise] never deny force\n",
        dev__shm__x="",
    )
    facts = found(root)
    assert [name for name, fact in facts.items() if fact.advice and name != "native module"] == []
    assert facts["huge pages for arenas"].value == "advise"
    assert facts["locked memory (ulimit -l)"].value == "unlimited"


def test_what_is_low_comes_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_MEMLOCK: 8 << 20, resource.RLIMIT_NOFILE: 1024}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], limits[which]))
    root = a_root(
        tmp_path,
        proc__sys__kernel__yama__ptrace_scope="1\n",
        sys__kernel__mm__transparent_hugepage__shmem_enabled="always within_size advise [never]\n",
    )
    facts = found(root)
    assert facts["locked memory (ulimit -l)"].value == "8 MiB"
    assert "LimitMEMLOCK=infinity" in facts["locked memory (ulimit -l)"].advice
    assert "ulimit -n 65536" in facts["open files (ulimit -n)"].advice
    assert facts["ptrace_scope"].value == "1: a process reaches its descendants only"
    assert "use arenas, or sysctl kernel.yama.ptrace_scope=0" in facts["ptrace_scope"].advice
    assert "echo advise > /sys/kernel/mm" in facts["huge pages for arenas"].advice
    assert "mount a tmpfs" in facts["/dev/shm"].advice


def path(transport: str, place: str, read_gb_per_s: float, refusal: str = "") -> PathFinding:
    measured = {"local": "dram", "remote": "dram", "read_gb_per_s": read_gb_per_s, "refusal": refusal}
    return PathFinding(transport=transport, place=place, **measured)


def test_what_works_is_a_table_and_what_does_not_is_said_once() -> None:
    findings = Findings(
        version="1",
        machine="m",
        memories=(MemoryFinding(kind="dram"), MemoryFinding(kind="vram", missing="no device")),
        transports=(
            TransportFinding(name="memory", refusals={PROCESS: "another process"}),
            TransportFinding(name="nixl", refusals={OWN: "not there", PROCESS: "not installed"}),
        ),
        paths=(
            path("tcp", LOOPBACK, 1.0),
            path("slow", OWN, 2.0),
            path("memory", OWN, 9.0),
            path("shm", PROCESS, 0.0, "not permitted"),
        ),
        host=(),
    )
    columns = [list(column.cells) for column in paths_table(findings).columns]
    assert columns[0] == [OWN, "", LOOPBACK]
    assert columns[2] == ["memory", "slow", "tcp"]
    assert columns[3] == ["9.00", "2.00", "1.00"]
    assert list(absences(findings)) == [
        ("vram", "no device"),
        ("nixl", "not installed"),
        (f"shm, {PROCESS}, dram - dram", "not permitted"),
    ]
