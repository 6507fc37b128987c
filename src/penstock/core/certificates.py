"""Certificates in files: loaded with errors that say what to mend, and read again when they change."""

import ssl
from contextlib import suppress
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.files import WatchedFiles
from penstock.core.log import get_logger

_log = get_logger()


class CertificateFiles:
    """A certificate whose files are read again when they change. One event loop owns it."""

    def __init__(self, certificate: str, *others: str) -> None:
        """Read the files by `_load`.

        Raises:
            ConfigError: a file cannot be read, or certificate and key do not belong together.
        """
        self._certificate = certificate
        self._files = WatchedFiles(certificate, *others)
        self._load()

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
            _log.info("certificate_reloaded", file=self._certificate)

    def _load(self) -> None:
        """Read the files; after an error what was read before is used.

        Raises:
            ConfigError: as above.
        """
        raise NotImplementedError


def load_pair(context: ssl.SSLContext, certificate: str, key: str, *, place: str) -> None:
    """Load a certificate and its private key into a context; `place` is where the graph names them.

    Raises:
        ConfigError: a file cannot be read, the key is encrypted, or they do not belong together.
    """
    files = Path(certificate).expanduser(), Path(key).expanduser()
    try:
        context.load_cert_chain(*files, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{place}: certificate {files[0]}, key {files[1]}: {reason(error)}; both must be PEM files that belong together"
        ) from error


def handshake_in_memory(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Let a client and a server shake hands until each has seen the other's certificate.

    Raises:
        ssl.SSLError: one of them refuses the other; `SSLCertVerificationError` because of its certificate.
    """
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(2):  # hellos, and then the certificates
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()


def reason(error: Exception) -> str:
    """Say why a file was not loaded."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _no_password() -> str:
    raise ValueError("the key is encrypted; decrypt it, and protect the file")
