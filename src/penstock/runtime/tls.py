"""TLS between frontends and workers: a certificate for each process, renewed in place."""

import ssl
from pathlib import Path
from typing import Self

import pydantic

from penstock.core.config import Config, wrong
from penstock.core.errors import ConfigError
from penstock.core.net.certificates import CertificateFiles, load_pair, reason


class PlaneTlsConfig(Config):
    """Certificates of this host's processes, for connections between frontends and workers over `tcp://`."""

    certificate: str
    """PEM file with this host's certificate, and those between it and the authority."""
    key: str
    """PEM file with its private key, not encrypted."""
    authority: str
    """PEM file with the certificates that sign those of the deployment; it should sign no others, since host names are not compared."""
    mutual: bool = True
    """Whether workers ask frontends for a certificate of the authority, too."""

    @pydantic.field_validator("certificate", "key", "authority")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name.strip():
            raise wrong("must name a PEM file, got ''")
        return name


class PlaneTls(CertificateFiles):
    """The two TLS contexts of a process. One event loop owns it.

    New connections use the files as they are now; open ones keep the certificate that they began with.
    """

    def __init__(self, config: PlaneTlsConfig) -> None:
        """Read the files.

        Raises:
            ConfigError: a file cannot be read, or certificate and key do not belong together.
        """
        self._config = config
        self.server: ssl.SSLContext
        """For connections that a worker accepts."""
        self.client: ssl.SSLContext
        """For connections that a frontend makes."""
        super().__init__(config.certificate, config.key, config.authority)

    @classmethod
    def of(cls, config: PlaneTlsConfig | None) -> Self | None:
        return None if config is None else cls(config)

    def _load(self) -> None:
        """Make both contexts from the files, and only then take them."""
        server = _context(ssl.PROTOCOL_TLS_SERVER, self._config)
        server.num_tickets = 0  # nobody resumes
        server.verify_mode = ssl.CERT_REQUIRED if self._config.mutual else ssl.CERT_NONE
        client = _context(ssl.PROTOCOL_TLS_CLIENT, self._config)
        self.server, self.client = server, client


def _context(protocol: int, config: PlaneTlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = (
        False  # workers register addresses; the authority signs for this deployment alone
    )
    context.verify_mode = ssl.CERT_REQUIRED
    load_pair(context, config.certificate, config.key, place="runtime.tls")
    authority = Path(config.authority).expanduser()
    try:
        context.load_verify_locations(authority)
    except OSError as error:
        raise ConfigError(
            f"runtime.tls.authority: {authority}: {reason(error)}; expected a PEM file"
        ) from error
    return context


def registry_context(tls: PlaneTlsConfig | None) -> ssl.SSLContext:
    """Make the context for a registry of another maker, whose host name is compared.

    Args:
        tls: its client certificate and authority; None for the system's authorities.

    Raises:
        ConfigError: a file cannot be read.
    """
    if tls is None:
        return ssl.create_default_context()
    authority = Path(tls.authority).expanduser()
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise ConfigError(
            f"runtime.tls.authority: {authority}: {reason(error)}; expected a PEM file"
        ) from error
    load_pair(context, tls.certificate, tls.key, place="runtime.tls")
    return context
