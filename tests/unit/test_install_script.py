"""tools/install.py: what pip's settings become for uv, and which packages a build of torch leaves out."""

import ast
import importlib.util
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

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
        (r"global.find-links='\n/one\n/two'", {"UV_FIND_LINKS": "/one,/two"}),
        (
            "install.index-url='https://near/simple'\nglobal.index-url='https://far/simple'\n:env:.timeout='7.5'",
            {"UV_DEFAULT_INDEX": "https://near/simple", "UV_HTTP_TIMEOUT": "7"},
        ),
        ("global.timeout='20'\ndownload.index-url='https://no/simple'\nfreeze.timeout='1'\nuser.cert='/no'", {"UV_HTTP_TIMEOUT": "20"}),
        ("""global.index-url="https://it's/simple\"""", {"UV_DEFAULT_INDEX": "https://it's/simple"}),
        ("global.keyring-provider='auto'\nglobal.no-index='y'\nglobal.cert='/'\nglobal.timeout='none'\nglobal.proxy=''",
         {"UV_KEYRING_PROVIDER": "disabled", "UV_NO_INDEX": "1", "SSL_CERT_DIR": "/"}),
        (":env:.index-url='https://env/simple'\nglobal.index-url='https://file/simple'", {"UV_DEFAULT_INDEX": "https://env/simple"}),
        ("global.cert='/etc/ca.pem'\nglobal.proxy='http://p:3128'", {"SSL_CERT_FILE": "/etc/ca.pem", "ALL_PROXY": "http://p:3128"}),
        ("global.no-index='false'\nglobal.progress-bar='off'\nnonsense", {}),
    ],
)  # fmt: skip
def test_settings_of_pip_are_handed_on(
    install: ModuleType, pip_config: str, expected: dict[str, str]
) -> None:
    settings = install.settings_for_uv(install.settings_of_pip(pip_config), {})
    assert settings.pop("UV_INDEX_STRATEGY", "unsafe-best-match") == "unsafe-best-match"
    assert settings == expected


def test_a_variable_of_uv_that_is_set_stays(install: ModuleType) -> None:
    pip = {"cert": "/a", "index-url": "https://a"}
    assert not install.settings_for_uv(pip, {"SSL_CERT_FILE": "/b", "UV_INDEX_URL": "https://b"})


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


def test_systems_without_wheels_are_refused(install: ModuleType) -> None:
    assert [bool(install.problem_of_libc(*libc)) for libc in (("glibc", "2.31"), ("glibc", "3.0"), ("glibc", "2.28"), ("musl", "1.2.5"), ("", ""))] \
        == [False, False, True, True, True]  # fmt: skip


SDISTS = {"nkeys"}
"""Packages of the lock file without a wheel: pure Python, which builds wherever isolation is on."""


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_every_locked_package_has_a_wheel_of_the_oldest_glibc(
    install: ModuleType, machine: str, minor: int
) -> None:
    """Nothing but Penstock is compiled on a user's machine; `OLDEST_GLIBC` is refused below."""
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
            and any(
                platform == "any" or _runs(platform, machine, install.OLDEST_GLIBC)
                for platform in platforms.split(".")
            )
            for pythons, abi, platforms in names
            for python in pythons.split(".")
        ):
            lacking.add(package["name"])
    assert lacking == SDISTS | {"penstock-llm"}


def _runs(platform: str, machine: str, glibc: tuple[int, int]) -> bool:
    if not platform.endswith(machine) or not platform.startswith(("manylinux", "linux")):
        return False
    found = re.match(r"manylinux_(\d+)_(\d+)_", platform)
    return not found or (int(found[1]), int(found[2])) <= glibc


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


def test_an_older_python_reads_the_file_as_far_as_its_refusal(install: ModuleType) -> None:
    source = (CHECKOUT / "tools/install.py").read_text()
    ast.parse(source, feature_version=(3, 6))
    classified = [
        name.rsplit(" ", 1)[1] for name in _project()["project"]["classifiers"] if "Python :: 3." in name
    ]
    assert "Python 3.11 to 3.14" in source
    assert (classified[0], classified[-1]) == ("3.11", "3.14")
    assert _project()["tool"]["uv"]["environments"] == ["sys_platform == 'linux' and python_version < '3.15'"]


def _project() -> dict[str, Any]:
    return tomllib.loads((CHECKOUT / "pyproject.toml").read_text())


def test_what_a_killed_install_left_incomplete_is_forgotten(install: ModuleType, tmp_path: Path) -> None:
    """uv takes a package for installed by the name of its `.dist-info`, whatever else is there."""
    site = tmp_path / "lib/python3.11/site-packages"
    whole = "{name}.py,sha256=0,5\n{name}-1.0.dist-info/INSTALLER,sha256=0,2\n{name}-1.0.dist-info/RECORD,,\n"
    for name, record in {
        "whole": whole,
        "lacks": whole,
        "half": whole,
        "begun": "begun.py,sha256=0,5\n",
        "bare": None,
    }.items():
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "INSTALLER").write_text("uv")
        (site / f"{name}.py").write_text("12345")
        if record:
            (info / "RECORD").write_text(record.format(name=name))
    (site / "lacks.py").unlink()
    (site / "half.py").write_text("123")
    install.Installer(tmp_path, native=False).forget_incomplete()
    assert [path.name for path in site.glob("*.dist-info")] == ["whole-1.0.dist-info"]


@pytest.mark.parametrize(
    ("python", "pip", "says"),
    [
        ("#!/bin/sh\necho '{version}'", "#!{venv}/bin/python", None),
        ("#!/bin/sh\necho '{version}'", "#!/elsewhere/.venv/bin/python", "another folder"),
        ("#!/bin/sh\necho 3.13.0", "#!{venv}/bin/python", "made with 3.13.0"),
        ("#!/gone/python", "#!{venv}/bin/python", "is gone"),
        (None, None, ""),
    ],
)
def test_an_environment_that_does_not_serve_is_made_anew(
    install: ModuleType, tmp_path: Path, python: str | None, pip: str | None, says: str | None
) -> None:
    (tmp_path / "bin").mkdir()
    for name, text in (("python", python), ("pip", pip)):
        if text:
            (tmp_path / "bin" / name).write_text(text.format(version=sys.version, venv=tmp_path) + "\n")
            (tmp_path / "bin" / name).chmod(0o755)
    installer = install.Installer(tmp_path, native=False)
    with installer.alone():
        reason = installer.why_anew()
    assert reason is None if says is None else says in reason
