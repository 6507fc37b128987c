"""Pythons that run other releases of Penstock than this checkout: the last one, and ones whose wire version is another.

Each is a virtual environment without packages of its own, which borrows those of the tests' environment.
"""

import subprocess
import sysconfig
import tarfile
import venv
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[2]
_RELEASE = "tests/data/release_frames.json"
"""Written once, at a release: the commit that wrote it is the release."""
_OTHER_WIRE = '''"""Penstock as a later or earlier release: another wire version, and a field in each message that others do not know."""

import msgspec

import penstock.core.wire

penstock.core.wire.WIRE_VERSION = {version}

from penstock.core import framing

_encode = framing.FrameCodec.encode


def encode(self, message):
    said = msgspec.msgpack.decode(_encode(self, message)[framing.LENGTH_BYTES :])
    said["of_another_release"] = [1, "two"]
    payload = msgspec.msgpack.encode(said)
    return len(payload).to_bytes(framing.LENGTH_BYTES, "little") + payload


framing.FrameCodec.encode = encode
'''


def last_release(folder: Path) -> Path:
    """Make a Python that runs the package as it was at the last release, without native code."""
    git = ("git", "-C", str(ROOT))
    found = subprocess.run(
        [*git, "log", "-1", "--format=%H", "--", _RELEASE], check=True, capture_output=True, text=True
    )
    packed = subprocess.run([*git, "archive", found.stdout.strip(), "src"], check=True, capture_output=True)
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(folder / "release", filter="data")
    packages = sysconfig.get_path("purelib")
    return _python(folder / "release-venv", f"{folder / 'release' / 'src'}\n{packages}\n")


def with_wire_version(folder: Path, version: int) -> Path:
    """Make a Python that runs this checkout as a release with another wire version."""
    venv_folder = folder / f"wire-{version}"
    packages = sysconfig.get_path("purelib")
    python = _python(venv_folder, f"import site; site.addsitedir({packages!r})\nimport of_another_release\n")
    (_packages(venv_folder) / "of_another_release.py").write_text(_OTHER_WIRE.format(version=version))
    return python


def _python(folder: Path, lines: str) -> Path:
    venv.create(folder, with_pip=False, symlinks=True)
    (_packages(folder) / "penstock_of_tests.pth").write_text(lines)
    return folder / "bin" / "python"


def _packages(folder: Path) -> Path:
    (found,) = folder.glob("lib/python*/site-packages")
    return found
