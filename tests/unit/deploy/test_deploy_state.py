import os
import resource
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.core.files import write_whole
from penstock.deploy.state import (
    RuntimeDirectory,
    admin_token_path,
    load_admin_token,
    load_hash_key,
    state_dir,
)


def test_without_a_home_to_write_to_the_state_is_private_in_the_temporary_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PENSTOCK_STATE_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    no_folder = tmp_path / "file"
    no_folder.touch()
    monkeypatch.setenv("HOME", str(no_folder))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = tmp_path / f"penstock-state-{os.getuid()}"
    assert state_dir("blue") == directory / "blue"
    assert load_admin_token() == (directory / "admin_token").read_text()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    directory.chmod(0o777)  # as if another user had made it to read the token
    with pytest.raises(ConfigError, match=r"is no private directory of user \d+; set PENSTOCK_STATE_DIR"):
        load_admin_token()


def test_the_hash_key_is_made_once_kept_and_private(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    key = load_hash_key(directory)
    assert len(key) == 16
    assert load_hash_key(directory) == key != load_hash_key(tmp_path / "c")
    assert [path.name for path in directory.iterdir()] == ["hash_key"]
    assert stat.S_IMODE((directory / "hash_key").stat().st_mode) == 0o600


def test_a_damaged_key_or_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "hash_key").write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"hash_key: must hold 16 bytes, has 5; delete it"):
        load_hash_key(tmp_path)
    with pytest.raises(ConfigError, match=r"not a directory; set PENSTOCK_STATE_DIR"):
        load_hash_key(tmp_path / "hash_key" / "below")


def test_the_admin_token_is_made_once_for_a_user_and_private(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_STATE_DIR", str(tmp_path / "state"))
    token = load_admin_token()
    assert len(token) >= 32
    assert load_admin_token() == token == admin_token_path().read_text()
    assert stat.S_IMODE(admin_token_path().stat().st_mode) == 0o600
    admin_token_path().chmod(0o640)
    with pytest.raises(
        ConfigError, match=r"admin_token: others may read or write it \(mode 640\); chmod 600 it"
    ):
        load_admin_token()
    admin_token_path().chmod(0o600)
    admin_token_path().write_text("short")
    with pytest.raises(ConfigError, match="delete it, and a new one is made"):
        load_admin_token()
    monkeypatch.setenv("PENSTOCK_ADMIN_TOKEN", "given")
    assert load_admin_token() == "given"


@pytest.mark.parametrize(
    "write", [lambda path: load_hash_key(path.parent), lambda path: write_whole(path, b"key")]
)
def test_a_full_disk_keeps_no_part_of_a_file(write: Callable[[Path], object], tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as where no byte more fits
    try:
        with pytest.raises((ConfigError, OSError), match=r"(?i)file too large"):
            write(tmp_path / "hash_key")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for runtime directories, with a path as short as it is in real life."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


def test_the_runtime_directory_is_private_and_goes(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RuntimeDirectory()
    assert directory.path.parent == parent
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    (directory.path / "hub.sock").touch()
    directory.remove()
    assert not directory.path.exists()
    directory.remove()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(parent / "absent"))
    with pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR"):
        RuntimeDirectory()


def test_a_path_too_long_for_sockets_is_left_for_a_shorter_one(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = parent / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    directory = RuntimeDirectory()
    assert directory.path.parent == Path("/tmp")
    directory.remove()


def test_what_a_killed_supervisor_left_is_removed(parent: Path) -> None:
    """Whether its process lives does not show in its number: it may be of another container, or a zombie."""
    killed = subprocess.Popen(
        [sys.executable, "-c", "from penstock.deploy.state import RuntimeDirectory as R; print(R().path); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert killed.stdout is not None
    orphan = Path(killed.stdout.readline().strip())
    (orphan / "hub.sock").touch()
    kept = RuntimeDirectory()
    assert orphan.exists(), "it lives"
    killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    elsewhere = kept.path.rename(parent / "penstock-4194305-x")  # a number that no process here has
    unfinished, of_older_release, other = (
        parent / f"penstock-{os.getpid()}-x", parent / "penstock-4194305-y", parent / "penstock-notes",
    )  # fmt: skip
    for path in (unfinished, of_older_release, other):
        path.mkdir()
    (of_older_release / "hub.sock").touch()
    RuntimeDirectory().remove()
    there = [path.exists() for path in (orphan, elsewhere, unfinished, of_older_release, other)]
    assert there == [False, True, False, True, True]
    killed.communicate()
    kept.remove()


@pytest.mark.slow
def test_many_that_start_at_once_over_what_was_left_neither_fail_nor_disturb_each_other(parent: Path) -> None:
    for number in range(200):
        left = parent / f"penstock-{number}-x"
        left.mkdir()
        (left / "lock").touch()
        (left / "hub.sock").touch()
    with ThreadPoolExecutor(16) as threads:
        made = list(threads.map(lambda _: RuntimeDirectory(), range(64)))
    assert {path.name for path in parent.iterdir()} == {directory.path.name for directory in made}
    assert all((directory.path / "lock").exists() for directory in made)
    for directory in made:
        directory.remove()
    assert not list(parent.iterdir())
