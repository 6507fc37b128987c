"""TLS between frontends and workers: a certificate for each process, renewed in place."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pydantic

from penstock.core.certificates import CertificateFiles, handshake_in_memory, load_pair, reason
from penstock.core.config import Config, wrong
from penstock.core.errors import ConfigError


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
            ConfigError: a file cannot be read, certificate and key do not belong together, or peers that ask for the certificate
                (`mutual`) would refuse it.
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
        if self._config.mutual:
            _check_certificate(server, client, self._config)
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
        raise _no_authority(authority, error) from error
    return context


def _check_certificate(server: ssl.SSLContext, client: ssl.SSLContext, config: PlaneTlsConfig) -> None:
    """Check that other hosts of the deployment would take the certificate: of one that does not a client only sees that it hangs up.

    Raises:
        ConfigError: it has expired, is not valid yet, or was signed by another authority.
    """
    try:
        handshake_in_memory(client, server)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"runtime.tls.certificate: {config.certificate}: {error.verify_message}; expected one that {config.authority} signed and"
            " that is valid now: renew it, or set this host's clock"
        ) from error


class RegistryTls(CertificateFiles):
    """The TLS context for a registry of another maker, whose host name is compared. One event loop owns it."""

    def __init__(self, config: PlaneTlsConfig) -> None:
        """Read the files.

        Raises:
            ConfigError: a file cannot be read, or certificate and key do not belong together.
        """
        self._config = config
        self._context: ssl.SSLContext
        super().__init__(config.certificate, config.key, config.authority)

    @property
    def context(self) -> ssl.SSLContext:
        """For a new connection: of the files as they are now."""
        self.reload()
        return self._context

    def _load(self) -> None:
        authority = Path(self._config.authority).expanduser()
        try:
            context = ssl.create_default_context(cafile=authority)
        except OSError as error:
            raise _no_authority(authority, error) from error
        load_pair(context, self._config.certificate, self._config.key, place="runtime.tls")
        self._context = context


def registry_contexts(tls: PlaneTlsConfig | None) -> Callable[[], ssl.SSLContext]:
    """Make what gives the context of each new connection to a registry of another maker.

    Args:
        tls: its client certificate and authority, read again when they change; None for the system's authorities.

    Raises:
        ConfigError: a file cannot be read, or certificate and key do not belong together.
    """
    if tls is None:
        system = ssl.create_default_context()
        return lambda: system
    files = RegistryTls(tls)
    return lambda: files.context


def _no_authority(authority: Path, error: OSError) -> ConfigError:
    return ConfigError(f"runtime.tls.authority: {authority}: {reason(error)}; expected a PEM file")
