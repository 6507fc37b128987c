"""What `make test` and CI do about programs that are missing, with programs of the test's own for dpkg, apt and sudo."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = (ROOT / "ci" / "packages.txt").read_text().split()
MISSING = ["chromium", "openssl"]


class Machine:
    """A folder of programs, which is the script's whole PATH; what they were called with is in a log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.log.touch()
        for name in ("bash", "dirname", "env", "grep", "true"):
            (folder / name).symlink_to(shutil.which(name))

    def has(self, name: str, says: str = "", code: int = 0) -> None:
        program = self.folder / name
        logs = f'echo "{name} $*" >>{self.log}\n' if name in {"apt-get", "sudo"} else ""
        passes_on = 'shift; exec "$@"\n' if name == "sudo" and code == 0 else f"exit {code}\n"
        program.write_text(f"#!{shutil.which('bash')}\n{logs}echo -n '{says}'\n{passes_on}")
        program.chmod(0o755)

    def installs(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "ci" / "install_packages", *arguments],
            env={"PATH": str(self.folder)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A Debian machine, of root, without `MISSING`."""
    made = Machine(tmp_path)
    here = [f"{package} installed\n" for package in PACKAGES if package not in MISSING]
    made.has("dpkg-query", "".join(here) + "openssl not-installed\n", code=1)
    made.has("apt-get")
    made.has("id", "0")
    return made


def test_where_nothing_is_missing_nothing_is_called(machine: Machine) -> None:
    machine.has("dpkg-query", "".join(f"{package} installed\n" for package in PACKAGES))
    for arguments in ((), ("--required",)):
        done = machine.installs(*arguments)
        assert (done.returncode, done.stdout, done.stderr, machine.calls()) == (0, "", "", [])


def test_root_installs_what_is_missing_and_nothing_else(machine: Machine) -> None:
    done = machine.installs()
    assert (done.returncode, done.stderr) == (0, "")
    update, install = machine.calls()
    assert update.endswith(" update")
    assert install.endswith(" install -y --no-install-recommends chromium openssl")


def test_sudo_installs_where_it_asks_for_no_password(machine: Machine) -> None:
    machine.has("id", "1000")
    machine.has("sudo")
    assert machine.installs("--required").returncode == 0
    assert all(call.startswith("sudo -n ") for call in machine.calls() if call.startswith("sudo"))
    assert machine.calls()[-1].endswith(" install -y --no-install-recommends chromium openssl")


@pytest.mark.parametrize("has_sudo", [True, False])
def test_who_may_not_install_is_told_how_to(machine: Machine, has_sudo: bool) -> None:
    machine.has("id", "1000")
    if has_sudo:
        machine.has("sudo", code=1)
    for arguments, code in (((), 0), (("--required",), 1)):
        done = machine.installs(*arguments)
        assert done.returncode == code
        assert done.stderr == (
            "ci/install_packages: missing: chromium openssl; install them with:"
            " sudo apt-get install -y --no-install-recommends chromium openssl\n"
        )
    assert not any("apt-get" in call for call in machine.calls())


def test_a_mirror_that_is_away_fails_only_what_is_required(machine: Machine) -> None:
    machine.has("apt-get", code=100)
    for arguments, code in (((), 0), (("--required",), 1)):
        done = machine.installs(*arguments)
        assert done.returncode == code
        assert "apt-get update failed; missing: chromium openssl" in done.stderr


def test_a_machine_without_apt_is_told_what_the_tests_use(machine: Machine) -> None:
    (machine.folder / "apt-get").unlink()
    for arguments, code in (((), 0), (("--required",), 1)):
        done = machine.installs(*arguments)
        assert done.returncode == code
        assert "no apt here" in done.stderr
        assert " ".join(PACKAGES) in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("never_skip", [True, False])
def test_a_test_without_its_program_skips_and_says_what_mends_it_but_never_in_ci(
    tmp_path: Path, never_skip: bool
) -> None:
    tests = ROOT / "tests" / "e2e" / "cli" / "test_simulation_page.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-k", "pointer", tests],
        env=os.environ | {"PATH": str(tmp_path), "PENSTOCK_NEVER_SKIP": "1" if never_skip else ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "chromium is not installed: sudo apt-get install -y chromium" in done.stdout
    assert ("1 error" if never_skip else "1 skipped") in done.stdout
    assert done.returncode == int(never_skip)
