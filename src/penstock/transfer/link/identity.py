"""The identity of an agent: name, token, host, certificate."""

import secrets
from collections.abc import Iterable, Mapping

from penstock.core.descriptors import RegionInfo
from penstock.transfer.config import TransferConfig
from penstock.transfer.link.handshake import Proof
from penstock.transfer.link.metadata import TRANSFER_VERSION, AgentMetadata, encode_metadata, host_fingerprint
from penstock.transfer.tls import TlsIdentity

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
