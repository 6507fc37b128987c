"""TLS between frontends and workers: a certificate for each process, renewed in place."""

import ssl
from pathlib import Path
from typing import Self

import pydantic

from penstock.core.config import Config, wrong
from penstock.core.errors import ConfigError
from penstock.core.files import WatchedFiles
from penstock.core.log import get_logger

_log = get_logger()


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


class PlaneTls:
    """The two TLS contexts of a process. One event loop owns it.

    New connections use the files as they are now; open ones keep the certificate that they began with.
    """

    def __init__(self, config: PlaneTlsConfig) -> None:
        """Read the files.

        Raises:
            ConfigError: a file cannot be read, or certificate and key do not belong together.
        """
        self._config = config
        self._files = WatchedFiles(config.certificate, config.key, config.authority)
        self.server: ssl.SSLContext
        """For connections that a worker accepts."""
        self.client: ssl.SSLContext
        """For connections that a frontend makes."""
        self._load()

    @classmethod
    def of(cls, config: PlaneTlsConfig | None) -> Self | None:
        return None if config is None else cls(config)

    async def watch(self) -> None:
        """Read the files again whenever they have changed, for ever. Wrong ones are logged, and those before stay."""
        await self._files.watch(self.reload)

    def reload(self) -> None:
        """Read the files again if they have changed; one of them alone may be older for a moment, which is tried again."""
        if not self._files.changed():
            return
        try:
            self._load()
        except ConfigError as error:
            _log.error(
                "certificate_not_reloaded",
                error=error.message,
                fix="mend the files; the ones before are used",
            )
        else:
            _log.info("certificate_reloaded", file=self._config.certificate)

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
    certificate, key, authority = (
        Path(file).expanduser() for file in (config.certificate, config.key, config.authority)
    )
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"runtime.tls: certificate {certificate}, key {key}: {_reason(error)}; both must be PEM files that belong together"
        ) from error
    try:
        context.load_verify_locations(authority)
    except OSError as error:
        raise ConfigError(
            f"runtime.tls.authority: {authority}: {_reason(error)}; expected a PEM file"
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
    certificate, key, authority = (
        Path(file).expanduser() for file in (tls.certificate, tls.key, tls.authority)
    )
    try:
        context = ssl.create_default_context(cafile=authority)
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"runtime.tls: {certificate}, {key}, {authority}: {_reason(error)}; expected PEM files"
        ) from error
    return context


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _no_password() -> str:
    raise ValueError("the key is encrypted; decrypt it, and protect the file")
