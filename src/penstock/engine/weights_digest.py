"""Digests of a checkpoint's weights, or an adapter's: stored KV is of these weights alone."""

import hashlib
from pathlib import Path

from penstock.core.errors import ConfigError

_PIECE_BYTES = 16 << 20
_WEIGHTS = ("*.safetensors", "*.bin", "config.json")


def weights_digest(directory: str) -> str:
    """Digest all bytes of the weight files and the config, as hex: about a second for each GB.

    Raises:
        ConfigError: there is no weight file, or it cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    files = _files(directory)
    if not any(file.suffix in {".safetensors", ".bin"} for file in files):
        raise ConfigError(
            f"kv: {directory}: there is no *.safetensors or *.bin whose digest would name the KV that outlives the worker; give"
            " the model as a directory with weights, or leave kv.disk out"
        )
    try:
        for file in files:
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            with file.open("rb") as opened:
                while piece := opened.read(_PIECE_BYTES):
                    digest.update(piece)
    except OSError as error:
        raise ConfigError(f"kv: the weights cannot be read for their digest: {error}") from error
    return digest.hexdigest()


def weights_stamp(directory: str) -> str:
    """Digest the names, sizes and times of the same files, as hex: another one after they were changed on this machine.

    Raises:
        ConfigError: a file cannot be found.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        for file in _files(directory):
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns} {status.st_ino} ".encode())
    except OSError as error:
        raise ConfigError(f"kv.host: the weights cannot be found: {error}") from error
    return digest.hexdigest()


def _files(directory: str) -> list[Path]:
    return sorted({file for pattern in _WEIGHTS for file in Path(directory).glob(pattern)})
