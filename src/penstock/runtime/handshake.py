"""The first three frames of a connection: both sides prove that they know the deployment's secret, and compare versions.

The server sends a fresh nonce. The client answers with its own nonce and an HMAC over both. The server's reply carries
another HMAC over both. The secret is never sent or logged.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.core.errors import ErrorInfo, PenstockError, ProtocolError, WorkerLost
from penstock.core.framing import Challenge, check_proof, check_version, new_nonce, prove
from penstock.core.hashing import DEFAULT_KEY, HASH_VERSION
from penstock.core.ids import WorkerId
from penstock.core.wire import WIRE_VERSION, Wire


class Hello(Wire, frozen=True, tag="hello"):
    """The client's answer, with a proof that it knows the deployment's secret.

    Attributes:
        worker_id: worker that the client expects at this address.
        window_tokens: tokens of each request that the worker may send before the client grants more.
        rank: the data-parallel rank that the connection is for.
        broadcast_key: not empty: new KV events and load reports reach the client by a carrier, in which this names it.
    """

    wire_version: int
    hash_version: int
    key_fingerprint: str
    nonce: bytes
    proof: bytes
    process: str = ""
    worker_id: WorkerId | None = None
    window_tokens: int = 0
    rank: int = 0
    broadcast_key: bytes = b""


class HelloReply(Wire, frozen=True, tag="hello_reply"):
    """The server's answer, with its own proof; after a reply with `error` the server closes the connection."""

    wire_version: int
    hash_version: int = 0
    key_fingerprint: str = ""
    proof: bytes = b""
    process: str = ""
    worker_id: WorkerId | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a process towards its peers.

    Attributes:
        worker_id: worker of this process; None for a frontend.
        hash_key: the deployment's key for block hashes.
        secret: the deployment's secret.
    """

    process: str = ""
    worker_id: WorkerId | None = None
    hash_key: bytes = field(default=DEFAULT_KEY, repr=False)
    secret: bytes = field(default=b"", repr=False)

    @property
    def key_fingerprint(self) -> str:
        """Digest of the hash key, to compare keys without sending them; the key has 128 random bits."""
        return hashlib.sha256(b"penstock hash key" + self.hash_key).hexdigest()[:16]


def challenge() -> Challenge:
    return Challenge.new(WIRE_VERSION)


def hello(
    identity: Identity,
    challenge: Challenge,
    *,
    expected: WorkerId | None = None,
    window_tokens: int = 0,
    rank: int = 0,
    broadcast_key: bytes = b"",
) -> Hello:
    """Answer a challenge, of any version."""
    nonce = new_nonce()
    return Hello(
        wire_version=WIRE_VERSION,
        hash_version=HASH_VERSION,
        key_fingerprint=identity.key_fingerprint,
        nonce=nonce,
        proof=_proof(identity.secret, b"hello", challenge.nonce, nonce),
        process=identity.process,
        worker_id=expected,
        window_tokens=window_tokens,
        rank=rank,
        broadcast_key=broadcast_key,
    )


def reply(
    identity: Identity,
    challenge: Challenge,
    hello: Hello,
    check: Callable[[Hello], None] = lambda _hello: None,
) -> HelloReply:
    """Check a client's hello, last by `check`, and make the reply; a refusal is a reply with `error`."""
    try:
        _check_wire_version(hello.wire_version)
        _check_proof(hello.proof, _proof(identity.secret, b"hello", challenge.nonce, hello.nonce))
        _check_hashes(identity, hello.hash_version, hello.key_fingerprint)
        if identity.worker_id is not None and hello.worker_id not in {None, identity.worker_id}:
            raise WorkerLost(
                f"worker {hello.worker_id} is expected here, but {identity.worker_id} listens; it has probably "
                "been replaced: try the workers that discovery names now"
            )
        check(hello)
    except PenstockError as error:
        return HelloReply(wire_version=WIRE_VERSION, error=error.to_info())
    return HelloReply(
        wire_version=WIRE_VERSION,
        hash_version=HASH_VERSION,
        key_fingerprint=identity.key_fingerprint,
        proof=_proof(identity.secret, b"reply", challenge.nonce, hello.nonce),
        process=identity.process,
        worker_id=identity.worker_id,
    )


def check_challenge(challenge: Challenge) -> None:
    """Check the version of a server's challenge. The client answers it all the same, so that the server can say why, too.

    Raises:
        ProtocolError: the server's wire version is incompatible.
    """
    _check_wire_version(challenge.version)


def check_reply(identity: Identity, challenge: Challenge, hello: Hello, reply: HelloReply) -> None:
    """Check the reply of a server that accepted this client.

    Raises:
        ProtocolError: the server does not know the secret, or has another hash version or key.
    """
    _check_proof(reply.proof, _proof(identity.secret, b"reply", challenge.nonce, hello.nonce))
    _check_hashes(identity, reply.hash_version, reply.key_fingerprint)


def _proof(secret: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return prove(secret, b"penstock " + side, server_nonce, client_nonce)


def _check_wire_version(theirs: int) -> None:
    check_version(theirs, WIRE_VERSION, "wire version: the peer speaks")


def _check_proof(theirs: bytes, ours: bytes) -> None:
    check_proof(
        theirs,
        ours,
        "deployment secret: the peer's proof does not fit ours, so the two secrets differ; "
        "start both processes with the secret of the same deployment",
    )


def _check_hashes(identity: Identity, version: int, fingerprint: str) -> None:
    if version != HASH_VERSION:
        raise ProtocolError(
            f"hash version: the peer's is {version}, ours {HASH_VERSION}, so that prefixes would never match; "
            "bring both to the same release of Penstock"
        )
    if fingerprint != identity.key_fingerprint:
        raise ProtocolError(
            f"hash key: the peer's has the fingerprint {fingerprint}, ours {identity.key_fingerprint}; "
            "it comes from the secret and the graph's name: give all hosts of a deployment a graph of one name"
        )
