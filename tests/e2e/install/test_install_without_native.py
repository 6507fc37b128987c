"""PENSTOCK_NATIVE=OFF: the package builds where no compiler works, and hashes the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.hashing import block_hashes

CHECKOUT = Path(__file__).parents[3]
PROGRAM = """
from penstock.core import log, native
from penstock.core.hashing import block_hashes

log.configure(process="test")
assert native.native is None
native.warn_if_disabled()
print(native.__file__)
print(block_hashes(range(1000), 16, b"salt", [(20, b"image")]).tolist())
"""


@pytest.mark.slow
def test_the_package_installs_and_hashes_without_a_compiler(tmp_path):
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    no_compiler = {"CC": "/bin/false", "CXX": "/bin/false", "PENSTOCK_NATIVE": "OFF"}
    subprocess.run(
        [*pip, "--target", target, CHECKOUT], check=True, env=os.environ | no_compiler, timeout=300
    )
    assert not list(target.rglob("*.so"))

    # -S: without site's .pth files, an editable install of the checkout does not come before `target`.
    packages = [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    search_path = os.pathsep.join([str(target), *packages])
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": search_path},
        timeout=60,
    )
    path, hashes = done.stdout.splitlines()
    assert Path(path).is_relative_to(target)
    assert hashes == str(block_hashes(range(1000), 16, b"salt", [(20, b"image")]).tolist())
    assert done.stderr.count("native_disabled") == 1
