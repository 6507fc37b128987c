"""Who an agent is to its peers."""

import secrets
from collections.abc import Iterable, Mapping

from penstock.core.descriptors import RegionInfo
from penstock.transfer.config import TransferConfig
from penstock.transfer.link.handshake import Proof
from penstock.transfer.link.metadata import TRANSFER_VERSION, AgentMetadata, encode_metadata, host_fingerprint
from penstock.transfer.tls import TlsIdentity

_TOKEN_BYTES = 16


class Identity:
    """An agent's name, what proves that it is the one of its metadata, and the machine that it runs on.

    Attributes:
        name: what peers call it.
        token: new for every agent; who has it was given the metadata.
        host: names the machine as far as memory and abstract sockets reach.
        tls: its certificate; None for no TLS.
        proof: what is proved to this agent, and by it.
    """

    def __init__(self, name: str, config: TransferConfig) -> None:
        """Make up a token.

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
        """Make what is proved to the agent with this token."""
        return Proof(self._secret, token)

    def metadata(
        self, addresses: tuple[str, ...], contacts: Mapping[str, bytes], regions: Iterable[RegionInfo]
    ) -> bytes:
        """Say what a peer has to know to connect."""
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
