"""A digest of a checkpoint's weights: KV on disks is of these weights alone."""

import hashlib
from pathlib import Path

from penstock.core.errors import ConfigError

_PIECE_BYTES = 16 << 20
_WEIGHTS = ("*.safetensors", "*.bin", "config.json")


def weights_digest(directory: str) -> str:
    """Digest all bytes of the weight files and the config, as hex: about a second for each GB.

    Raises:
        ConfigError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    files = sorted({file for pattern in _WEIGHTS for file in Path(directory).glob(pattern)})
    try:
        for file in files:
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            with file.open("rb") as opened:
                while piece := opened.read(_PIECE_BYTES):
                    digest.update(piece)
    except OSError as error:
        raise ConfigError(f"kv.disk: the weights cannot be read for their digest: {error}") from error
    return digest.hexdigest()
