import msgspec
import pytest

from penstock.core.errors import ProtocolError, WorkerLost, from_info
from penstock.core.hashing import HASH_VERSION
from penstock.core.wire import WIRE_VERSION
from penstock.runtime import handshake
from penstock.runtime.handshake import Identity

SECRET = b"correct horse battery staple"
OURS = Identity(process="frontend-0", secret=SECRET)
THEIRS = Identity(process="worker-0", worker_id=7, secret=SECRET)


def shake(client=OURS, server=THEIRS, *, expected=7, **changes):
    challenge = handshake.challenge()
    hello = msgspec.structs.replace(handshake.hello(client, challenge, expected=expected), **changes)
    reply = handshake.reply(server, challenge, hello)
    if reply.error is not None:
        raise from_info(reply.error)
    handshake.check_reply(client, challenge, hello, reply)
    return reply


@pytest.mark.parametrize(
    ("expected", "version"),
    [(7, WIRE_VERSION), (None, WIRE_VERSION), (7, WIRE_VERSION - 1), (7, WIRE_VERSION + 1)],
)
def test_those_of_one_deployment_and_of_neighbouring_versions_accept_each_other(expected, version):
    reply = shake(expected=expected, wire_version=version)
    assert (reply.process, reply.worker_id) == ("worker-0", 7)


def test_another_worker_is_not_whom_one_expects():
    with pytest.raises(WorkerLost, match="worker 9 is expected here, but 7 listens"):
        shake(expected=9)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"wire_version": WIRE_VERSION + 2},
            f"the peer speaks {WIRE_VERSION + 2}, this process {WIRE_VERSION}",
        ),
        ({"wire_version": WIRE_VERSION - 2}, "same release"),
        ({"hash_version": HASH_VERSION + 1}, f"the peer's is {HASH_VERSION + 1}, ours {HASH_VERSION}"),
        ({"key_fingerprint": "f00d"}, "the peer's has the fingerprint f00d, .* a graph of one name"),
        ({"proof": b""}, "two secrets differ"),
        ({"nonce": b"another"}, "two secrets differ"),
    ],
)
def test_a_mismatch_is_named(changes, what):
    with pytest.raises(ProtocolError, match=what):
        shake(**changes)


def test_an_unauthenticated_client_learns_only_that_the_secret_differs():
    with pytest.raises(ProtocolError, match="deployment secret"):
        shake(Identity(secret=b"guess", hash_key=b"k" * 16), hash_version=99)


def test_a_server_must_prove_itself_too():
    challenge = handshake.challenge()
    hello = handshake.hello(OURS, challenge)
    impostor = Identity(secret=b"guess")
    reply = handshake.reply(impostor, challenge, handshake.hello(impostor, challenge))
    with pytest.raises(ProtocolError, match="two secrets differ"):
        handshake.check_reply(OURS, challenge, hello, reply)
    with pytest.raises(ProtocolError, match="two secrets differ"):
        handshake.check_reply(OURS, challenge, hello, msgspec.structs.replace(reply, proof=hello.proof))


def test_nothing_shows_the_secret():
    challenge = handshake.challenge()
    hello = handshake.hello(OURS, challenge)
    shown = f"{OURS!r} {OURS.key_fingerprint} {hello!r} {handshake.reply(THEIRS, challenge, hello)!r}"
    assert SECRET.decode() not in shown
    assert repr(OURS.hash_key) not in shown


def test_every_challenge_is_new():
    assert handshake.challenge() != handshake.challenge()
    challenge = handshake.challenge()
    assert handshake.hello(OURS, challenge).proof != handshake.hello(OURS, challenge).proof
