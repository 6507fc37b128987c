"""A digest of a checkpoint's weights, or an adapter's: KV that outlives a worker is of these weights alone."""

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
    files = sorted({file for pattern in _WEIGHTS for file in Path(directory).glob(pattern)})
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
