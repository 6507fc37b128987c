"""Certificates for TLS tests, made by the program `openssl`."""

import subprocess
from pathlib import Path

from penstock.transfer.tls import TlsConfig

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")
_DAYS = "2"


def make_authority(folder: Path, name: str) -> Path:
    """Make a certificate authority; return the path of its certificate. The key is in the same directory."""
    certificate = folder / f"{name}.pem"
    files = ("-keyout", str(certificate.with_suffix(".key")), "-out", str(certificate))
    _openssl("req", "-x509", *_NEW_KEY, *files, "-subj", f"/CN={name}", "-days", _DAYS)
    return certificate


def make_certificate(folder: Path, name: str, authority: Path, *, days: str = _DAYS) -> TlsConfig:
    """Make an agent's certificate, signed by an authority; one of -1 days has expired."""
    key, request, signed = (str(folder / f"{name}.{end}") for end in ("key", "csr", "pem"))
    _openssl("req", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
    signer = ("-CA", str(authority), "-CAkey", str(authority.with_suffix(".key")), "-CAcreateserial")
    _openssl("x509", "-req", "-in", request, *signer, "-out", signed, "-days", days)
    return TlsConfig(certificate=signed, key=key, authority=str(authority))


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
