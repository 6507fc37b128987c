"""What a deployment keeps on disk: a key that outlives it, and a directory that must not."""

import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.hashing import KEY_BYTES

ADMIN_TOKEN_VARIABLE = "PENSTOCK_ADMIN_TOKEN"  # noqa: S105 - its name
_TOKEN_BYTES = 32


def state_dir(name: str) -> Path:
    """Return where deployment `name` keeps what must survive a restart."""
    return _state_parent() / name


def _state_parent() -> Path:
    """PENSTOCK_STATE_DIR, else XDG_STATE_HOME/penstock, else ~/.local/state/penstock."""
    if given := os.environ.get("PENSTOCK_STATE_DIR"):
        return Path(given)
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "penstock"


def load_hash_key(directory: Path) -> bytes:
    """Read the deployment's block-hash key, making one the first time.

    Kept across restarts, so that blocks stored by an earlier run are still found by their names.

    Raises:
        ConfigError: the directory cannot be used, or the file is damaged.
    """
    path = directory / "hash_key"
    key = _read_or_create(path, lambda: secrets.token_bytes(KEY_BYTES))
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{path}: must hold {KEY_BYTES} bytes, has {len(key)}; delete it, and a new one is made"
        )
    return key


def admin_token_path() -> Path:
    """Where the admin token of this user's deployments is, for them and for commands."""
    return _state_parent() / "admin_token"


def load_admin_token() -> str:
    """Give PENSTOCK_ADMIN_TOKEN, else the token of this user's deployments, making one the first time.

    Raises:
        ConfigError: the file cannot be used, is damaged, or others may read it.
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
    """Let the first of several deployments that start at once win: a file appears whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
                file.write(make())
            try:
                os.link(file.name, path)  # NamedTemporaryFile made it with mode 0600
            except FileExistsError:
                pass
            finally:
                Path(file.name).unlink()
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: {(error.strerror or str(error)).lower()}; set PENSTOCK_STATE_DIR to a directory you can write"
        ) from error


class RuntimeDirectory:
    """A private directory for sockets, gone when the deployment is.

    Under XDG_RUNTIME_DIR where there is one, else the system's temporary directory; mode 0700. Its deployment holds a lock on a file
    in it. The kernel lets go of that lock when the deployment ends in whatever way, so that the next start of the same user
    removes what a killed one left, and nothing of one that lives, be it in another container that shares the parent.
    """

    def __init__(self) -> None:
        parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        if len(os.fsencode(parent)) > _PARENT_BYTES_MAX:
            parent = Path("/tmp")  # noqa: S108 - what follows is made by mkdtemp
        try:
            _remove_orphans(parent)
            self.path, self._lock = _make_locked(parent)
        except OSError as error:
            raise ConfigError(
                f"{parent}: cannot make a private directory there: {(error.strerror or str(error)).lower()};"
                " set XDG_RUNTIME_DIR to a directory you can write"
            ) from error

    def remove(self) -> None:
        """Remove it with all that is in it. Safe twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


_PREFIX = "penstock-"
_LOCK_NAME = "lock"
_PARENT_BYTES_MAX = 60  # a Unix socket's whole path has at most 107
_TRIES_MAX = 100


def _make_locked(parent: Path) -> tuple[Path, int | None]:
    """Make a directory; one that another start took for an orphan, before the lock was held, is left to that one."""
    for _ in range(_TRIES_MAX):
        path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        lock = _lock(path)
        if lock is not None:
            return path, lock
    raise OSError(errno.EBUSY, f"{_TRIES_MAX} directories in a row were removed by others")


def _lock(path: Path) -> int | None:
    """Lock a directory; None where somebody else has, or removes it.

    Who makes a directory and who removes it both go through this. The lock of a file that is not in the directory any more says nothing.
    """
    try:
        lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), (path / _LOCK_NAME).lstat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


def _remove_orphans(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}[0-9]*-*"):
        try:
            if _may_be_orphan(path) and (lock := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
        except OSError:
            continue  # what cannot be looked at now is for a later start


def _may_be_orphan(path: Path) -> bool:
    """Tell whether a directory is this user's, and of a release that locks it: others say nothing of whether they live."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    names = {inside.name for inside in path.iterdir()}
    return not names or _LOCK_NAME in names
