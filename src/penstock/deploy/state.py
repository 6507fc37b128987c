"""Files of a deployment: the block-hash key and admin token, which survive restarts, and a runtime directory, which is removed."""

import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.files import write_new
from penstock.core.hashing import KEY_BYTES
from penstock.deploy.group_file import end_groups

ADMIN_TOKEN_VARIABLE = "PENSTOCK_ADMIN_TOKEN"  # noqa: S105 - a variable's name
PLANNER_LOG = "planner.jsonl"
"""Name of the planner's log in a deployment's directory."""
OUTPUT_LOG = "output.log"
"""Name of the log of what a deployment's processes print."""
_TOKEN_BYTES = 32
LOCK_NAME = "lock"
"""Name of the file in a runtime directory that the deployment has locked."""


def state_dir(name: str) -> Path:
    """Return the directory of deployment `name` that survives restarts."""
    return _state_parent() / name


def _state_parent() -> Path:
    """PENSTOCK_STATE_DIR, else XDG_STATE_HOME/penstock, else ~/.local/state/penstock.

    Where the user has no home, or may not write there, it is a directory of the user's in the system's temporary directory.
    """
    if given := os.environ.get("PENSTOCK_STATE_DIR"):
        return Path(given)
    try:
        home = os.environ.get("XDG_STATE_HOME")
        parent = (Path(home) if home else Path.home() / ".local" / "state") / "penstock"
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError):  # RuntimeError: no HOME, and a user without a name
        return _temporary_state()
    return parent if os.access(parent, os.W_OK | os.X_OK) else _temporary_state()


def _temporary_state() -> Path:
    """Make the directory, which nobody else may own: whoever makes it could read the tokens in it.

    Raises:
        ConfigError: another user has made it.
    """
    path = Path(tempfile.gettempdir()) / f"penstock-state-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise _unwritable(path, error) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{path}: is no private directory of user {os.getuid()}; set PENSTOCK_STATE_DIR to a directory you can write"
        )
    return path


def load_hash_key(directory: Path) -> bytes:
    """Read the deployment's block-hash key; creates one the first time.

    The key survives restarts, so that blocks stored by an earlier run are still found by hash.

    Raises:
        ConfigError: the directory is not writable, or the file is damaged.
    """
    path = directory / "hash_key"
    key = _read_or_create(path, lambda: secrets.token_bytes(KEY_BYTES))
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{path}: must hold {KEY_BYTES} bytes, has {len(key)}; delete it, and a new one is made"
        )
    return key


def admin_token_path() -> Path:
    """Path of the admin token file, which all deployments and commands of this user share."""
    return _state_parent() / "admin_token"


def load_admin_token() -> str:
    """Give PENSTOCK_ADMIN_TOKEN, else the token in this user's file; creates one the first time.

    Raises:
        ConfigError: the file is unreadable, damaged, or readable by others.
    """
    if given := os.environ.get(ADMIN_TOKEN_VARIABLE, "").strip():
        return given
    path = admin_token_path()
    content = _read_or_create(path, lambda: secrets.token_urlsafe(_TOKEN_BYTES).encode())
    if path.stat().st_mode & 0o077:
        raise ConfigError(
            f"{path}: others may read or write it (mode {path.stat().st_mode & 0o777:o}); chmod 600 it"
        )
    token = content.decode("ascii", "replace").strip()
    if len(token) < _TOKEN_BYTES or not token.isprintable():
        raise ConfigError(
            f"{path}: holds no token of at least {_TOKEN_BYTES} characters; delete it, and a new one is made"
        )
    return token


def _read_or_create(path: Path, make: Callable[[], bytes]) -> bytes:
    """Read a file, or create it atomically: of several deployments that start at once, the first one's file wins."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            write_new(path, make())
        return path.read_bytes()
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    reason = (error.strerror or str(error)).lower()
    return ConfigError(f"{path}: {reason}; set PENSTOCK_STATE_DIR to a directory you can write")


class RuntimeDirectory:
    """A private directory for sockets, removed with the deployment.

    It is under XDG_RUNTIME_DIR if set, else in the system's temporary directory, with mode 0700. The deployment holds a
    file lock in it. The kernel releases the lock however the deployment ends. The same user's next start removes unlocked
    directories, and no locked one, even of another container that shares the parent.
    """

    def __init__(self) -> None:
        parent = _runtime_parent()
        try:
            _remove_orphans(parent)
            self.path, self._lock = _make_locked(parent)
        except OSError as error:
            raise ConfigError(
                f"{parent}: cannot make a private directory there: {(error.strerror or str(error)).lower()};"
                " set XDG_RUNTIME_DIR to a directory you can write"
            ) from error

    def remove(self) -> None:
        """Remove the directory and its contents. Safe twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def runtime_directories() -> list[Path]:
    """List the runtime directories of this user's deployments, those that have ended included."""
    found = []
    for path in sorted(_runtime_parent().glob(f"{_PREFIX}[0-9]*-*")):
        try:
            status = path.lstat()
        except OSError:
            continue  # it has just ended
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            found.append(path)
    return found


def is_locked(path: Path) -> bool:
    """Tell whether a deployment has locked its runtime directory."""
    try:
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


@contextmanager
def orphan(path: Path) -> Iterator[bool]:
    """Lock the runtime directory of a deployment that has ended, so that it can be removed; gives whether that is so."""
    lock = _lock(path) if (path / LOCK_NAME).exists() else None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _runtime_parent() -> Path:
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if len(os.fsencode(parent)) > _PARENT_BYTES_MAX:
        return Path("/tmp")  # noqa: S108 - mkdtemp creates a private directory in it
    return parent


_PREFIX = "penstock-"
_PARENT_BYTES_MAX = 60  # a Unix socket's path has at most 107 bytes
_TRIES_MAX = 100


def _make_locked(parent: Path) -> tuple[Path, int | None]:
    """Create and lock a directory; tries again if another start removed it before it was locked."""
    for _ in range(_TRIES_MAX):
        path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        lock = _lock(path)
        if lock is not None:
            return path, lock
    raise OSError(errno.EBUSY, f"{_TRIES_MAX} directories in a row were removed by others")


def _lock(path: Path) -> int | None:
    """Lock a directory; None if another process has locked or removed it.

    Both creating and removing a directory take this lock. A lock on a file that was deleted meanwhile does not count.
    """
    try:
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), (path / LOCK_NAME).lstat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


def _remove_orphans(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}[0-9]*-*"):
        try:
            if _may_be_orphan(path) and (lock := _lock(path)) is not None:
                end_groups(path)
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
        except OSError:
            continue  # unreadable now: left to a later start


def _may_be_orphan(path: Path) -> bool:
    """Tell whether a directory is this user's and has a lock file; without one its deployment may be running."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    names = {inside.name for inside in path.iterdir()}
    return not names or LOCK_NAME in names
