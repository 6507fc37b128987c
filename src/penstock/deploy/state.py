"""What a deployment keeps on disk: a key that outlives it, and a directory that must not."""

import os
import secrets
import shutil
import tempfile
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.hashing import KEY_BYTES


def state_dir(name: str) -> Path:
    """Return where deployment `name` keeps what must survive a restart.

    PENSTOCK_STATE_DIR names the parent, else XDG_STATE_HOME/penstock, else ~/.local/state/penstock.
    """
    if given := os.environ.get("PENSTOCK_STATE_DIR"):
        return Path(given) / name
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "penstock" / name


def load_hash_key(directory: Path) -> bytes:
    """Read the deployment's block-hash key, making one the first time.

    Kept across restarts, so that blocks stored by an earlier run are still found by their names.

    Raises:
        ConfigError: the directory cannot be used, or the file is damaged.
    """
    path = directory / "hash_key"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = _read_or_create(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: {(error.strerror or str(error)).lower()}; set PENSTOCK_STATE_DIR to a directory you can write"
        ) from error
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{path}: must hold {KEY_BYTES} bytes, has {len(key)}; delete it, and a new one is made"
        )
    return key


def _read_or_create(path: Path) -> bytes:
    """Let the first of several deployments that start at once win: a file appears whole or not at all."""
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".hash_key-", delete=False) as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(file.name, path)  # NamedTemporaryFile made it with mode 0600
        except FileExistsError:
            pass
        finally:
            Path(file.name).unlink()
    return path.read_bytes()


class RuntimeDirectory:
    """A private directory for sockets, gone when the deployment is.

    Under XDG_RUNTIME_DIR where there is one, else the system's temporary directory; mode 0700. What a killed
    supervisor left behind is removed by the next one of the same user.
    """

    def __init__(self) -> None:
        parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        if len(os.fsencode(parent)) > _PARENT_BYTES_MAX:
            parent = Path("/tmp")  # noqa: S108 - what follows is made by mkdtemp
        try:
            _remove_orphans(parent)
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        except OSError as error:
            raise ConfigError(
                f"{parent}: cannot make a private directory there: {(error.strerror or str(error)).lower()};"
                " set XDG_RUNTIME_DIR to a directory you can write"
            ) from error

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


_PREFIX = "penstock-"
_PARENT_BYTES_MAX = 60  # a Unix socket's whole path has at most 107


def _remove_orphans(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}[0-9]*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if path.stat().st_uid == os.getuid() and pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)
