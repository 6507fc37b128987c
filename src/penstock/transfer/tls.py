"""TLS between agents: both show a certificate of the deployment's authority, and the metadata pins the listener's."""

import hashlib
import socket
import ssl
from pathlib import Path
from typing import Self

from penstock.core.config import Config
from penstock.core.errors import ConfigError, ProtocolError


class TlsConfig(Config):
    """Certificates for links and streams over `tcp://`; an agent that has them speaks TLS there and nothing else."""

    certificate: str
    """PEM file with this agent's certificate, and those between it and the authority."""
    key: str
    """PEM file with its private key, not encrypted."""
    authority: str
    """PEM file with the certificates that sign those of peers; it should sign no others, as whoever has one may connect."""


class TlsIdentity:
    """An agent's certificate, and the certificates that it accepts."""

    def __init__(self, config: TlsConfig) -> None:
        """Read the files.

        Raises:
            ConfigError: a file cannot be read, or certificate and key do not belong together.
        """
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, config)
        self.server.num_tickets = 0  # nobody resumes
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, config)
        text = Path(config.certificate).read_text(encoding="ascii", errors="replace")
        first = text[text.index(_BEGIN) : text.index(_END) + len(_END)]
        self.fingerprint = fingerprint_of(ssl.PEM_cert_to_DER_cert(first))
        """The fingerprint of the certificate, for this agent's metadata."""

    @classmethod
    def of(cls, config: TlsConfig | None) -> Self | None:
        return None if config is None else cls(config)

    def check_peer(self, certificate: bytes | None, fingerprint: bytes) -> None:
        """Check that a listener has the certificate that its metadata names.

        Raises:
            ProtocolError: it has another one.
        """
        if certificate is None or fingerprint_of(certificate) != fingerprint:
            raise ProtocolError(
                "the listener's certificate is another one than its metadata names: exchange metadata anew, or somebody"
                " listens in its place"
            )

    def wrap(self, connection: socket.socket, *, server_side: bool) -> ssl.SSLSocket:
        """Wrap a connected socket; the caller runs the TLS handshake."""
        context = self.server if server_side else self.client
        return context.wrap_socket(connection, server_side=server_side, do_handshake_on_connect=False)


def fingerprint_of(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def _context(protocol: int, config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # agents move between hosts: metadata names the certificate itself
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(config.certificate, config.key, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls: certificate {config.certificate}, key {config.key}: {error}; both must be PEM files that belong together"
        ) from error
    try:
        context.load_verify_locations(config.authority)
    except OSError as error:
        raise ConfigError(f"tls.authority: {config.authority}: {error}; expected a PEM file") from error
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; decrypt it, and protect the file")
