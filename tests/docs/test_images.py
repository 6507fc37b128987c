"""Container files: linted, and what the manifests expect of them. None is built here."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock import __version__
from penstock.deploy.manifests.options import CACHE_PATH, RenderOptions
from penstock.deploy.manifests.pod_graph import KV_PORT, PROBE_PORT, REQUEST_PORT
from penstock.deploy.manifests.workloads import NIXL_PORT, USER
from penstock.engine.vllm.arguments import VERSIONS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy/images").glob("Containerfile*"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_container_file_is_sound(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_what_the_manifests_expect(path: Path) -> None:
    text = path.read_text()
    build, final = text.split(" AS build\n")[1].split("\nFROM ")
    assert "sbom.json" in build
    assert re.findall(r"(?m)^USER (.*)$", final) == [f"{USER}:{USER}"]
    assert f"--uid {USER} --gid {USER}" in final
    assert re.search(r'(?m)^ENTRYPOINT \["/usr/bin/tini", "--", "/opt/penstock/bin/penstock"\]$', final)
    ports = [REQUEST_PORT, KV_PORT, PROBE_PORT] + ([NIXL_PORT] if path.suffix == ".cuda" else [])
    assert re.findall(r"(?m)^EXPOSE (.*)$", final) == [" ".join(map(str, [8000, *ports]))]
    (base,) = re.findall(r"(?m)^ARG BASE=(\S+)$", text)
    assert re.fullmatch(r"docker\.io/\S+:\d+\.\d+\.\d+-\S+", base), "pinned by a full version"
    (extras,) = re.findall(r"(?m)^ARG EXTRAS=(\S+)$", text)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)
    if path.suffix != ".cuda":
        assert "gateway" in extras.split(","), "deploy/gateway/picker.yaml runs it"
    assert f"--owner={USER} --group={USER} {CACHE_PATH}" in final, "a new volume gets the directory's owner"
    for copied in re.findall(r"(?m)^COPY (?!--from)(.*) \S+$", text):
        assert all((ROOT / name).exists() for name in copied.split())
    options = RenderOptions()
    (tag,) = re.findall(r"-t (\S+) \.", text)
    assert tag in {options.image, options.gpu_image}
    assert tag.endswith(f":{__version__}")


def test_the_cuda_image_has_the_vllm_that_the_adapter_drives() -> None:
    (version,) = re.findall(r"vllm==(\S+)", (ROOT / "deploy/images/Containerfile.cuda").read_text())
    assert version.startswith(f"{VERSIONS}.")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_image_pins_each_python_package_to_a_version_that_the_package_takes(path: Path) -> None:
    text = path.read_text()
    (constraints,) = re.findall(r"(?m)^ENV PIP_CONSTRAINT=/source/(\S+)$", text)
    assert f"deploy/images/{constraints} ./" in text, "it is copied where pip looks"
    lines = (path.parent / constraints).read_text().splitlines()[1:]
    pinned = dict(line.split("==") for line in lines)
    (extras,) = re.findall(r"(?m)^ARG EXTRAS=(\S+)$", text)
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*package["project"]["dependencies"], *package["build-system"]["requires"]]
    for extra in extras.split(","):
        wanted += package["project"]["optional-dependencies"][extra]
    wanted += re.findall(r"[a-z0-9-]+==[0-9.]+", "\n".join(re.findall(r"pip install (.*)", text)))
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert pinned[name] in requirement.specifier, (
            f"{requirement}: tools/image_constraints.sh makes {constraints} anew"
        )
