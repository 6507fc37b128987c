"""TLS of the listening port; a renewed certificate is read without a restart."""

import ssl
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.files import WatchedFiles
from penstock.core.log import get_logger
from penstock.frontend.config import ServerTlsConfig

_log = get_logger()


class ServerTls:
    """The certificate of a port. One event loop owns it."""

    def __init__(self, config: ServerTlsConfig) -> None:
        """Read certificate and key.

        Raises:
            ConfigError: a file cannot be read, or they do not belong together.
        """
        self._config = config
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        """For new connections; those that are open keep the certificate that they began with."""
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._files = WatchedFiles(config.certificate, config.key)
        self._load()

    async def watch(self) -> None:
        """Read the files again whenever they have changed, for ever. Wrong ones are logged, and those before stay."""
        await self._files.watch(self.reload)

    def reload(self) -> None:
        """Read the files again if they have changed; one of them alone may be older for a moment, which is tried again."""
        if not self._files.changed():
            return
        try:
            ServerTls(self._config)  # a pair that does not fit would leave the context without a key
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
        certificate, key = (Path(file).expanduser() for file in (self._config.certificate, self._config.key))
        try:
            self.context.load_cert_chain(certificate, key, password=_no_password)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(
                f"frontend.tls: certificate {certificate}, key {key}: {reason}; both must be PEM files that belong together"
            ) from error


def _no_password() -> str:
    raise ValueError("the key is encrypted; decrypt it, and protect the file")
