"""The deployment's secret: given where hosts share it, random for one host."""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.hashing import KEY_BYTES
from penstock.graph.runtime import RuntimeSpec

SECRET_VARIABLE = "PENSTOCK_SECRET"  # noqa: S105 - a variable's name
_RANDOM_BYTES = 32
_CHARACTERS_MIN = 16
_MAKE_ONE = "openssl rand -hex 32 makes one"


def deployment_secret(spec: RuntimeSpec) -> bytes:
    """Give the deployment's secret.

    Raises:
        ConfigError: hosts have to share it and none is given, or it is too short or unreadable.
    """
    given = _given(spec)
    if given is not None:
        return given
    if spec.spans_hosts or spec.listen is not None or spec.leader is not None:
        where = spec.hub or spec.join or spec.listen or spec.leader
        raise ConfigError(
            f"runtime: {where}: other hosts may connect there, and no secret is given, so that anyone could send requests;"
            f" set runtime.secret_file or {SECRET_VARIABLE} to the same secret on each host ({_MAKE_ONE})"
        )
    return secrets.token_bytes(_RANDOM_BYTES)


def has_secret(spec: RuntimeSpec) -> bool:
    """Say whether a secret is given, which other hosts and regions may have too.

    Raises:
        ConfigError: it is too short or unreadable.
    """
    return _given(spec) is not None


def shared_hash_key(secret: bytes, name: str) -> bytes:
    """Derive the key of block hashes of deployment `name`, equal on all hosts that share the secret."""
    return hmac.digest(secret, b"penstock hash key " + name.encode(), hashlib.sha256)[:KEY_BYTES]


def _given(spec: RuntimeSpec) -> bytes | None:
    if spec.secret_file is None:
        source, text = SECRET_VARIABLE, os.environ.get(SECRET_VARIABLE, "")
        if not text.strip():
            return None
    else:
        source, path = f"runtime.secret_file: {spec.secret_file}", Path(spec.secret_file).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{source}: {(error.strerror or str(error)).lower()}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{source}: not UTF-8 text; expected one line ({_MAKE_ONE})") from error
    text = text.strip()
    if len(text) < _CHARACTERS_MIN:
        raise ConfigError(
            f"{source}: has {len(text)} characters; a secret needs at least {_CHARACTERS_MIN} ({_MAKE_ONE})"
        )
    return text.encode()
