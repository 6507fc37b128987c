"""TLS of the listening port; a renewed certificate is read without a restart."""

import ssl

from penstock.core.net.certificates import CertificateFiles, load_pair
from penstock.frontend.config import ServerTlsConfig


class ServerTls(CertificateFiles):
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
        super().__init__(config.certificate, config.key)

    def _load(self) -> None:
        # A pair that does not fit would leave the port's context without a key, so another one has it first.
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
            load_pair(context, self._config.certificate, self._config.key, place="frontend.tls")
