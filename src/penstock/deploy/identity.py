"""Who this host is, and the secret that the hosts of a deployment share."""

import hashlib
import hmac
import os
import secrets
import socket

from penstock.core.errors import ConfigError
from penstock.core.hashing import KEY_BYTES
from penstock.core.types.instances import Location, label_problem
from penstock.graph.runtime import RuntimeSpec
from penstock.runtime.credentials import given_text

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
    given = given_text(
        spec.secret_file,
        field="runtime.secret_file",
        variable=SECRET_VARIABLE,
        expected=f"expected one line ({_MAKE_ONE})",
    )
    if given is None:
        return None
    source, text = given[0], given[1].strip()
    if len(text) < _CHARACTERS_MIN:
        raise ConfigError(
            f"{source}: has {len(text)} characters; a secret needs at least {_CHARACTERS_MIN} ({_MAKE_ONE})"
        )
    return text.encode()


_VARIABLES = {
    "host": "PENSTOCK_HOST", "rack": "PENSTOCK_RACK", "zone": "PENSTOCK_ZONE", "region": "PENSTOCK_REGION",
}  # fmt: skip


def location_here(configured: Location) -> Location:
    """Merge a configured location with the environment, which wins; the host defaults to this one.

    Raises:
        ConfigError: a variable has no name that can be used.
    """
    said = {level: os.environ.get(variable, "").strip() for level, variable in _VARIABLES.items()}
    for level, name in said.items():
        if problem := label_problem(name, is_host=level == "host"):
            raise ConfigError(f"{_VARIABLES[level]}: {problem}")
    location = configured.model_copy(update={level: name for level, name in said.items() if name})
    return location if location.host else location.model_copy(update={"host": socket.gethostname()})
