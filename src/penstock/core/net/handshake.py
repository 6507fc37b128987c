"""How two processes prove to each other that they know a secret: an HMAC over a fresh nonce of each side.

The listening side sends a `Challenge`, the initiator answers with its nonce and a proof, the listening side answers with another proof.
What else the two tell each other is the plane's own. The secret is never sent or logged.
"""

import hashlib
import hmac
import secrets

from penstock.core.errors import ProtocolError
from penstock.core.wire import Wire

UNAUTHENTICATED_FRAME_BYTES_MAX = 4096
"""The longest frame that is read from a peer before its proof."""
NONCE_BYTES = 16
_NEIGHBOURS = 1


class Challenge(Wire, frozen=True, tag="challenge"):
    """The listening side's first frame. `version` is the version of the plane's protocol; `nonce` is new for every connection."""

    version: int
    nonce: bytes

    @classmethod
    def new(cls, version: int) -> "Challenge":
        return cls(version=version, nonce=new_nonce())


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def prove(key: bytes, purpose: bytes, *nonces: bytes) -> bytes:
    """Compute the proof of `key` for one purpose; proofs of different purposes differ."""
    return hmac.digest(key, purpose + b"".join(nonces), hashlib.sha256)


def check_proof(theirs: bytes, ours: bytes, error: str) -> None:
    """Compare a peer's proof with the expected one in constant time.

    Raises:
        ProtocolError: with the text `error`, if they differ.
    """
    if not hmac.compare_digest(theirs, ours):
        raise ProtocolError(error)


def check_version(theirs: int, ours: int, what: str) -> None:
    """Accept a peer's version if it is ours or a neighbour of ours.

    Args:
        theirs: the peer's version.
        ours: this process's version.
        what: begins the error's text, before `theirs`.

    Raises:
        ProtocolError: the versions are incompatible.
    """
    if abs(theirs - ours) > _NEIGHBOURS:
        raise ProtocolError(
            f"{what} {theirs}, this process {ours} and its neighbours; bring both to the same release of Penstock"
        )
