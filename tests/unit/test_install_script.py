"""tools/install.py: what pip's settings become for uv, and which packages a build of torch leaves out."""

import importlib.util
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.markers import Marker

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", CHECKOUT / "tools/install.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("pip_config", "expected"),
    [
        ("", {}),
        ("global.index-url='https://mirror/simple'", {"UV_DEFAULT_INDEX": "https://mirror/simple"}),
        ("global.extra-index-url='file:///a file:///b'", {"UV_INDEX": "file:///a file:///b"}),
        (r"user.find-links='\n/one\n/two'", {"UV_FIND_LINKS": "/one,/two"}),
        (
            "global.index-url='https://far/simple'\nuser.index-url='https://near/simple'\n:env:.timeout='7.5'",
            {"UV_DEFAULT_INDEX": "https://near/simple", "UV_HTTP_TIMEOUT": "7"},
        ),
        (":env:.index-url='https://env/simple'\nglobal.index-url='https://file/simple'", {"UV_DEFAULT_INDEX": "https://env/simple"}),
        ("global.cert='/etc/ca.pem'\nglobal.proxy='http://p:3128'", {"SSL_CERT_FILE": "/etc/ca.pem", "ALL_PROXY": "http://p:3128"}),
        ("global.no-index='false'\nglobal.progress-bar='off'\nnonsense", {}),
    ],
)  # fmt: skip
def test_settings_of_pip_are_handed_on(
    install: ModuleType, pip_config: str, expected: dict[str, str]
) -> None:
    settings = install.settings_for_uv(pip_config, {})
    assert settings.pop("UV_INDEX_STRATEGY", "unsafe-best-match") == "unsafe-best-match"
    assert settings == expected


def test_a_variable_of_uv_that_is_set_stays(install: ModuleType) -> None:
    assert not install.settings_for_uv("global.cert='/a'", {"SSL_CERT_FILE": "/b"})


def test_the_build_of_torch_for_cpus_leaves_out_what_gpus_need(install: ModuleType) -> None:
    lines = ["nvidia-cublas==13.1 --hash=sha256:1", "torch==2.13.0 ; sys_platform == 'linux' --hash=sha256:2", "triton==3.7", "numpy==2.4.6 --hash=sha256:3"]  # fmt: skip
    assert install.with_torch("cpu", lines) == ["torch==2.13.0+cpu", "numpy==2.4.6 --hash=sha256:3"]
    for_gpus = install.with_torch("pypi", lines)
    assert for_gpus[1].startswith("torch===2.13.0 "), "== takes 2.13.0+cpu too"
    assert [for_gpus[0], *for_gpus[2:]] == [lines[0], *lines[2:]]


def test_every_package_that_torch_alone_brings_is_left_out(install: ModuleType) -> None:
    """A new package of the GPU's family in the lock file would be installed beside the build for CPUs."""
    packages = {
        package["name"]: package for package in tomllib.loads((CHECKOUT / "uv.lock").read_text())["package"]
    }

    def reached(*, without_gpu: bool) -> set[str]:
        project = packages["penstock-llm"]
        needed = [
            *project["dependencies"],
            *(need for extra in project["optional-dependencies"].values() for need in extra),
        ]
        needed += [need for group in project["dev-dependencies"].values() for need in group]
        names: set[str] = set()
        while needed:
            name = needed.pop()["name"]
            if name in names or (without_gpu and install.GPU_PACKAGES.match(name)):
                continue
            names.add(name)
            needed += packages[name].get("dependencies", [])
        return names

    left_out = reached(without_gpu=False) - reached(without_gpu=True)
    assert {"triton", "cuda-bindings"} < left_out
    assert all(install.GPU_PACKAGES.match(name) for name in left_out), "torch for CPUs needs none of these"


def test_what_cannot_be_installed_is_said_without_a_traceback(tmp_path: Path) -> None:
    command = [
        sys.executable,
        CHECKOUT / "tools/install.py",
        "env",
        "--venv",
        tmp_path / "venv",
        tmp_path / "none.txt",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "none.txt" in done.stderr


SDISTS = {"nkeys"}
"""Packages of the lock file without a wheel: pure Python, which builds wherever isolation is on."""


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_every_locked_package_has_a_wheel_for_debian_12(machine: str, minor: int) -> None:
    """Nothing but Penstock is compiled on a user's machine, whose C library is 2.36 or newer."""
    abis = [f"cp3{minor}", "abi3", "none"]
    tags = {(f"cp3{minor}", abi) for abi in abis} | {(f"cp3{older}", "abi3") for older in range(2, minor)}
    tags |= {
        (f"py{version}", "none") for version in ("3", f"3{minor}", *(f"3{older}" for older in range(minor)))
    }
    lacking = set()
    for package in tomllib.loads((CHECKOUT / "uv.lock").read_text())["package"]:
        marks = package.get("resolution-markers")
        if marks and not any(
            Marker(mark).evaluate({"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.0"})
            for mark in marks
        ):
            continue
        names = [
            wheel["url"].rsplit("/", 1)[1].removesuffix(".whl").split("-")[-3:]
            for wheel in package.get("wheels", ())
        ]
        if not any(
            (python, abi) in tags
            and any(platform == "any" or _runs(platform, machine) for platform in platforms.split("."))
            for pythons, abi, platforms in names
            for python in pythons.split(".")
        ):
            lacking.add(package["name"])
    assert lacking == SDISTS | {"penstock-llm"}


def _runs(platform: str, machine: str) -> bool:
    if not platform.endswith(machine) or not platform.startswith(("manylinux", "linux")):
        return False
    found = re.match(r"manylinux_2_(\d+)_", platform)
    return not found or int(found[1]) <= 36


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "80000"], "PORT=80000: expected a number from 0 to 65535"),
        (["--port", "eight"], "PORT=eight: expected a number"),
        (["--torch", "rocm"], "TORCH=rocm: expected auto, cpu or pypi"),
        (["--native", "maybe"], "PENSTOCK_NATIVE=maybe: expected ON or OFF"),
    ],
)
def test_a_wrong_word_is_refused_before_anything_is_installed(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    command = [sys.executable, CHECKOUT / "tools/install.py", "demo", "--venv", tmp_path / "venv", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, list(tmp_path.iterdir())) == (1, [])
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_found_before_the_install(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [
            sys.executable,
            CHECKOUT / "tools/install.py",
            "demo",
            "--venv",
            tmp_path / "venv",
            "--port",
            port,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, list(tmp_path.iterdir())) == (1, [])
    assert f"PORT={port}: Address already in use; stop what listens there" in done.stderr
