"""The handshake of a link: each side proves that it knows the listener's token and the deployment's secret."""

import secrets
from collections.abc import Callable, Iterable, Mapping

from penstock.core.descriptors import RegionInfo
from penstock.core.errors import PenstockError, ProtocolError, from_info
from penstock.core.framing import Challenge, check_proof, new_nonce, prove
from penstock.transfer.config import TlsIdentity, TransferConfig
from penstock.transfer.link.frames import (
    TRANSFER_VERSION,
    AgentMetadata,
    Greeting,
    LinkFrame,
    Welcome,
    check_version,
    encode_metadata,
    host_fingerprint,
)
from penstock.transfer.link.links import SocketLink


class Proof:
    """Makes and checks the proofs of a handshake.

    The key is derived from the deployment's secret and the token in the listening agent's metadata.
    """

    def __init__(self, secret: bytes, token: bytes) -> None:
        """Derive the key."""
        self._key = prove(b"penstock transfer" + secret, token)

    def challenge(self) -> Challenge:
        return Challenge.new(TRANSFER_VERSION)

    def greet(self, challenge: Challenge, name: str, host: bytes) -> Greeting:
        """Answer a challenge of any version, so that the other side too can say why the versions do not fit."""
        nonce = new_nonce()
        return Greeting(
            version=TRANSFER_VERSION,
            nonce=nonce,
            proof=self._prove(b"greeting", challenge.nonce, nonce),
            name=name,
            host=host,
        )

    def check_greeting(self, challenge: Challenge, greeting: Greeting) -> None:
        """Check the initiator.

        Raises:
            ProtocolError: its secret, token or version differs.
        """
        check_version(greeting.version, f"agent {greeting.name}")
        self._check(greeting.proof, self._prove(b"greeting", challenge.nonce, greeting.nonce), greeting.name)

    def welcome(self, challenge: Challenge, greeting: Greeting, link_id: int) -> Welcome:
        return Welcome(proof=self._prove(b"welcome", challenge.nonce, greeting.nonce), link_id=link_id)

    def check_welcome(self, challenge: Challenge, greeting: Greeting, welcome: Welcome, peer: str) -> None:
        """Check the listening side.

        Raises:
            ProtocolError: it does not know the secret or the token.
        """
        self._check(welcome.proof, self._prove(b"welcome", challenge.nonce, greeting.nonce), peer)

    def stream_key(self, challenge: Challenge, greeting: Greeting) -> bytes:
        """Derive the key that opens streams of this link."""
        return self._prove(b"stream", challenge.nonce, greeting.nonce)

    def _prove(self, side: bytes, *nonces: bytes) -> bytes:
        return prove(self._key, side, *nonces)

    @staticmethod
    def _check(theirs: bytes, ours: bytes, peer: str) -> None:
        check_proof(
            theirs,
            ours,
            f"agent {peer}: its proof does not fit: the metadata is not of the agent that runs there now, or the two"
            " `secret`s differ; exchange metadata anew, and give both agents the deployment's secret",
        )


class ClientHandshake:
    """The initiator's side of the handshake."""

    def __init__(
        self,
        proof: Proof,
        name: str,
        host: bytes,
        *,
        peer: str,
        check_certificate: Callable[[bytes | None], None],
    ) -> None:
        """Prepare the handshake.

        Args:
            proof: for the peer's token.
            name: this agent's.
            host: its machine.
            peer: the other agent's name.
            check_certificate: raises ProtocolError if the certificate is not the one of the peer's metadata.
        """
        self._proof = proof
        self._name = name
        self._host = host
        self._peer = peer
        self._check_certificate = check_certificate
        self._said: tuple[Challenge, Greeting] | None = None

    def began(self, link: SocketLink) -> None:
        """Check the listener's certificate; the challenge comes next."""
        try:
            self._check_certificate(link.channel.peer_certificate)
        except ProtocolError as error:
            self._give_up(link, error)

    def received(self, link: SocketLink, message: LinkFrame) -> None:
        try:
            match message, self._said:
                case Challenge(), None:
                    self._said = message, self._proof.greet(message, self._name, self._host)
                    link.channel.send(self._said[1])
                    check_version(message.version, f"agent {self._peer}")
                case Welcome(error=None), (challenge, greeting):
                    self._proof.check_welcome(challenge, greeting, message, self._peer)
                    link.admitted(self._proof.stream_key(challenge, greeting), message.link_id)
                case Welcome(error=info), _ if info is not None:
                    raise from_info(info)
                case _:
                    raise ProtocolError(f"a {type(message).__name__} instead of a handshake")
        except PenstockError as error:
            self._give_up(link, error)

    @staticmethod
    def _give_up(link: SocketLink, error: PenstockError) -> None:
        link.opened.set_exception(error)
        link.opened.exception()
        link.channel.close(error.message)  # what was said still goes out, so that the other side knows why


class ServerHandshake:
    """The listening side of the handshake."""

    def __init__(
        self, proof: Proof, admit: Callable[[SocketLink], int], refuse: Callable[[PenstockError], None]
    ) -> None:
        """Prepare the handshake.

        Args:
            proof: for this agent's token.
            admit: registers the link and returns its id.
            refuse: called with the error of a handshake that failed.
        """
        self._proof = proof
        self._admit = admit
        self._refuse = refuse
        self._challenge = proof.challenge()

    def began(self, link: SocketLink) -> None:
        link.channel.send(self._challenge)

    def received(self, link: SocketLink, message: LinkFrame) -> None:
        if not isinstance(message, Greeting):
            raise ProtocolError(f"a {type(message).__name__} instead of a handshake")
        try:
            self._proof.check_greeting(self._challenge, message)
        except ProtocolError as error:
            self._refuse(error)
            link.channel.send(Welcome(error=error.to_info()))
            link.opened.set_exception(error)
            link.opened.exception()
            link.channel.close(error.message)
            return
        link.identify(message.name, message.host)
        link_id = self._admit(link)
        link.channel.send(self._proof.welcome(self._challenge, message, link_id))
        link.admitted(self._proof.stream_key(self._challenge, message), link_id)


_TOKEN_BYTES = 16


class Identity:
    """An agent's name, the proof that it is the agent of its metadata, and its host.

    Attributes:
        name: its name at peers.
        token: random; a peer that knows it was given the metadata.
        host: names the machine and its namespaces, see `host_fingerprint`.
        tls: its certificate; None for no TLS.
        proof: makes and checks proofs of this agent's token.
    """

    def __init__(self, name: str, config: TransferConfig) -> None:
        """Draw a token and read the certificates.

        Raises:
            ConfigError: the certificates cannot be read.
        """
        self.name = name
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self.host = host_fingerprint()
        self.tls = TlsIdentity.of(config.tls)
        self._secret = config.secret.get_secret_value().encode()
        self.proof = self.proof_for(self.token)

    def proof_for(self, token: bytes) -> Proof:
        """Give the proofs of another agent's token."""
        return Proof(self._secret, token)

    def metadata(
        self, addresses: tuple[str, ...], contacts: Mapping[str, bytes], regions: Iterable[RegionInfo]
    ) -> bytes:
        """Encode what a peer needs to connect."""
        return encode_metadata(
            AgentMetadata(
                version=TRANSFER_VERSION,
                name=self.name,
                token=self.token,
                host=self.host,
                addresses=addresses,
                contacts=dict(contacts),
                regions=tuple(regions),
                certificate=self.tls.fingerprint if self.tls else b"",
            )
        )
