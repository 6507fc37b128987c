"""Certificates for TLS tests, made by the program `openssl`."""

import subprocess
from pathlib import Path

from penstock.transfer.config import TlsConfig

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")
_DAYS = "2"


def make_authority(folder: Path, name: str) -> Path:
    """Make a certificate authority; return the path of its certificate. The key is in the same directory."""
    certificate = folder / f"{name}.pem"
    files = ("-keyout", str(certificate.with_suffix(".key")), "-out", str(certificate))
    # What Python 3.13 and newer ask of an authority, as RFC 5280 does; a server that shows this certificate itself signs too.
    uses = ("-addext", "keyUsage=critical,digitalSignature,keyCertSign,cRLSign")
    _openssl("req", "-x509", *_NEW_KEY, *files, "-subj", f"/CN={name}", "-days", _DAYS, *uses)
    return certificate


def make_certificate(
    folder: Path, name: str, authority: Path, *, address: str | None = None, days: int = 2
) -> TlsConfig:
    """Make a certificate, signed by an authority; of a host of this address, and expired where `days` is below 0."""
    key, request, signed = (str(folder / f"{name}.{end}") for end in ("key", "csr", "pem"))
    names = ("-subj", f"/CN={name}", *(("-addext", f"subjectAltName=IP:{address}") if address else ()))
    _openssl("req", *_NEW_KEY, "-keyout", key, "-out", request, *names)
    signer: tuple[str, ...] = (
        "-CA",
        str(authority),
        "-CAkey",
        str(authority.with_suffix(".key")),
        "-CAcreateserial",
    )
    identifiers = folder / "identifiers.cnf"
    identifiers.write_text("subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n")
    signer += ("-copy_extensions", "copy", "-extfile", str(identifiers))
    _openssl("x509", "-req", "-in", request, *signer, "-out", signed, "-days", str(days))
    return TlsConfig(certificate=signed, key=key, authority=str(authority))


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
