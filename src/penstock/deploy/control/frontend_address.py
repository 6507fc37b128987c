"""Where a command reaches a frontend, and which certificate it trusts there."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from penstock.core.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where commands look for a server where no deployment of this user runs on this host, and `--url` names none."""
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class FrontendAddress:
    """A frontend's URL.

    Attributes:
        url: paths are appended to it.
        name: of the deployment that was found on this host; None where `--url` names the server.
        certificate: file of the only certificate that is trusted, of a deployment of this host; None: the usual authorities.
        is_guess: whether it is the usual URL, as no deployment was found.
    """

    url: str
    name: str | None = None
    certificate: Path | None = None
    is_guess: bool = False

    def __str__(self) -> str:
        """Name it in a message."""
        if self.is_guess:
            return self.url
        return f"--url: {self.url}" if self.name is None else f"{self.name} at {self.url}"

    def tls(self) -> ssl.SSLContext:
        """Make the context of connections to it.

        A certificate of this host's own deployment is trusted for itself, whatever host name it has. Else the system's authorities
        are, or SSL_CERT_FILE, which may be the server's own certificate, whoever signed it.

        Raises:
            ConfigError: the certificate's file cannot be read.
        """
        if self.certificate is None:
            context = ssl.create_default_context()
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            return context
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            text = self.certificate.read_text(encoding="utf-8")
            first = text[text.index(_BEGIN) : text.index(_END) + len(_END)]
            context.load_verify_locations(cadata=first)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self}: its certificate {self.certificate} cannot be read: {error}; run as the deployment's user"
            ) from error
        return context


def base_of(url: str) -> str:
    """Give the base URL, to which paths are appended.

    Raises:
        ConfigError: `url` is no URL.
    """
    why = ""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        is_url, why = False, f"{error}; "
    if not is_url:
        raise ConfigError(f"--url: {url!r}: {why}expected a URL such as {DEFAULT_URL}")
    return url.rstrip("/").removesuffix("/v1")
