"""Broadcasts as a broker sees them: bytes, after a proof that their worker knows the deployment's secret."""

import hmac

import msgspec

from penstock.core.errors import ProtocolError
from penstock.core.net.handshake import prove
from penstock.core.types.broadcast import Broadcast
from penstock.core.wire import encode

_PURPOSE = b"penstock broadcast"
_PROOF_BYTES = 16
_broadcasts = msgspec.msgpack.Decoder(Broadcast)


def seal(secret: bytes, broadcast: Broadcast) -> bytes:
    """Encode a broadcast, with a proof of the secret before it."""
    body = encode(broadcast)
    return prove(secret, _PURPOSE, body)[:_PROOF_BYTES] + body


def unseal(secret: bytes, data: bytes) -> Broadcast:
    """Read a broadcast.

    Raises:
        ProtocolError: it is of another deployment or release, or damaged.
    """
    proof, body = data[:_PROOF_BYTES], data[_PROOF_BYTES:]
    if not hmac.compare_digest(proof, prove(secret, _PURPOSE, body)[:_PROOF_BYTES]):
        raise ProtocolError(
            "its proof does not fit the deployment's secret: two deployments share one runtime.namespace, or their secrets"
            " differ; give each deployment a namespace of its own, and all its hosts one secret"
        )
    try:
        return _broadcasts.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(body)} bytes cannot be read: {error}; update the older side") from error
