"""TLS of the listening port: a renewed certificate is read without a restart, and clients that refuse it are told of."""

import asyncio
import math
import ssl
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter

from penstock.core.certificates import CertificateFiles, handshake_in_memory, load_pair
from penstock.core.log import get_logger
from penstock.frontend.config import ServerTlsConfig

_LOG_EVERY_S = 10.0
_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL
_log = get_logger()


class RefusedHandshakes:
    """Counts TLS handshakes that failed, and tells of clients that do not trust the certificate. One event loop owns it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the counter."""
        self._counter = Counter(
            "penstock_frontend_tls_refused",
            "TLS handshakes that failed: the client, such as another region's link, does not trust this port's certificate"
            " (certificate), or spoke no TLS, or left (other).",
            ["reason"],
            registry=registry,
        )
        self._logged_s = -math.inf

    def note(self, peer: str, error: OSError) -> None:
        """Count a handshake; at most one certificate in 10 s is logged.

        Args:
            peer: the client's address.
            error: why it failed.
        """
        reason = getattr(error, "reason", None) or ""
        is_certificate = "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason)
        self._counter.labels("certificate" if is_certificate else "other").inc()
        now_s = asyncio.get_running_loop().time()
        if is_certificate and now_s >= self._logged_s + _LOG_EVERY_S:
            self._logged_s = now_s
            _log.warning(
                "certificate_refused",
                peer=peer,
                reason=reason.lower().replace("_", " "),
                fix="the client does not trust frontend.tls.certificate: give it the authority that signed it (a region's link:"
                " regions.N.tls.authority there), or a certificate of the name that it asks for",
            )


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
        if _has_expired(self.context, self._config.certificate):
            _log.error(
                "certificate_expired",
                file=self._config.certificate,
                fix="clients refuse it: renew the files; they are read again within 2 s",
            )


def _has_expired(context: ssl.SSLContext, certificate: str) -> bool:
    """Tell whether a client that trusts the certificate itself finds it expired, by a handshake in memory."""
    trusting = ssl.create_default_context(cafile=str(Path(certificate).expanduser()))
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        handshake_in_memory(trusting, context)
    except ssl.SSLCertVerificationError as error:
        return error.verify_code == _EXPIRED
    except ssl.SSLError:  # what else a client finds, it says itself
        return False
    return False
