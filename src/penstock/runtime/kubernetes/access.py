"""How a process reaches its cluster's API server: by its pod's service account, or by a kubeconfig.

Tokens and certificates are files that the kubelet replaces, so they are read again when they change.
"""

import base64
import binascii
import os
import ssl
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from penstock.core.document import parse_yaml
from penstock.core.errors import ConfigError
from penstock.core.files import WatchedFiles
from penstock.core.log import get_logger
from penstock.core.net.certificates import load_pair, reason

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_HOST, _PORT, _CONFIG = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBECONFIG"
Pem = Path | bytes
"""Certificates or a key: a file, or its content."""
_log = get_logger()


class KubernetesAccess:
    """An API server, and the credentials for it. One event loop owns it."""

    def __init__(
        self,
        server: str,
        *,
        namespace: str,
        token: str | None = None,
        token_file: Path | None = None,
        authority: Pem | None = None,
        pair: tuple[Pem, Pem] | None = None,
        verify: bool = True,
    ) -> None:
        """Read the files.

        Args:
            server: `https://HOST:PORT`.
            namespace: where objects of this process are.
            token: a bearer token, or
            token_file: the file that has one.
            authority: PEM with the certificates that sign the server's; None for the system's.
            pair: PEM with a client certificate, and its key.
            verify: whether the server's certificate is checked.

        Raises:
            ConfigError: a file cannot be read.
        """
        self.server = server.rstrip("/")
        self.namespace = namespace
        self._token = token
        self._token_file = token_file
        self._authority = authority
        self._pair = pair
        self._verify = verify
        self._token_watch = WatchedFiles(*([token_file] if token_file else []))
        self._tls_watch = WatchedFiles(
            *(each for each in (authority, *(pair or ())) if isinstance(each, Path))
        )
        if token_file is not None:
            self._token = _read(token_file, "service account")
        self._context = self._make_context()

    @classmethod
    def find(
        cls, environment: Mapping[str, str] = os.environ, *, service_account: Path = SERVICE_ACCOUNT
    ) -> Self:
        """Take the kubeconfig that KUBECONFIG names, else the pod's service account, else `~/.kube/config`.

        Raises:
            ConfigError: there is none of them, or it cannot be used; the text says why.
        """
        if environment.get(_CONFIG):
            return cls.of_config(Path(environment[_CONFIG]).expanduser())
        host, port = environment.get(_HOST), environment.get(_PORT, "443")
        if host:
            bracketed = f"[{host}]" if ":" in host else host
            return cls(
                f"https://{bracketed}:{port}",
                namespace=_read(service_account / "namespace", "service account"),
                token_file=service_account / "token",
                authority=service_account / "ca.crt",
            )
        default = Path("~/.kube/config").expanduser()
        if default.exists():
            return cls.of_config(default)
        raise ConfigError(
            f"kubernetes: this is no pod ({_HOST} is not set), and neither {_CONFIG} nor {default} is there; run in a"
            f" cluster, or set {_CONFIG}"
        )

    @classmethod
    def of_config(cls, path: Path) -> Self:
        """Use the current context of a kubeconfig.

        Raises:
            ConfigError: it cannot be read, or needs what is not supported: plug-ins, passwords.
        """
        data = parse_yaml(_read(path, _CONFIG), source=str(path))
        context = _named(data, "contexts", "context", data.get("current-context"), path)
        cluster = _named(data, "clusters", "cluster", context.get("cluster"), path)
        user = _named(data, "users", "user", context.get("user"), path) if context.get("user") else {}
        for key in ("exec", "auth-provider", "username"):
            if key in user:
                raise ConfigError(
                    f"{path}: user {context['user']}: {key} is not supported; use a token, tokenFile or client certificate"
                    " (kubectl create token makes one)"
                )
        pair = [_pem(user, name, path) for name in ("client-certificate", "client-key")]
        token_file = path.parent / user["tokenFile"] if "tokenFile" in user else None
        server = cluster.get("server", "")
        if urlsplit(server).scheme not in {"http", "https"}:
            raise ConfigError(
                f"{path}: cluster {context['cluster']}: server must be https://HOST:PORT, got {server!r}"
            )
        return cls(
            server,
            namespace=context.get("namespace", "default"),
            token=user.get("token"),
            token_file=token_file,
            authority=_pem(cluster, "certificate-authority", path),
            pair=(pair[0], pair[1]) if pair[0] and pair[1] else None,
            verify=not cluster.get("insecure-skip-tls-verify", False),
        )

    def headers(self) -> dict[str, str]:
        """Give the headers that say who asks; a token that was replaced is the new one."""
        if self._token_file is not None and self._token_watch.changed():
            try:
                self._token = _read(self._token_file, "service account")
            except ConfigError as error:
                _log.warning("token_not_read", error=error.message, fix="the one before is used")
        return {} if self._token is None else {"Authorization": f"Bearer {self._token}"}

    def context(self) -> ssl.SSLContext | None:
        """Give the TLS context for new connections; None for a server without TLS."""
        if self._context is not None and self._tls_watch.changed():
            try:
                self._context = self._make_context()
            except ConfigError as error:
                _log.warning("certificate_not_reloaded", error=error.message, fix="those before are used")
        return self._context

    def _make_context(self) -> ssl.SSLContext | None:
        if not self.server.startswith("https:"):
            return None
        with ExitStack() as stack:
            authority = None if self._authority is None else _as_file(self._authority, stack)
            try:
                context = ssl.create_default_context(cafile=authority)
            except OSError as error:
                place = self._authority if isinstance(self._authority, Path) else "certificate-authority-data"
                raise ConfigError(f"kubernetes: {place}: {reason(error)}; expected PEM") from error
            if not self._verify:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            if self._pair is not None:
                certificate, key = (_as_file(each, stack) for each in self._pair)
                place = "kubernetes" if isinstance(self._pair[1], Path) else "kubernetes: client-key-data"
                load_pair(context, str(certificate), str(key), place=place)
        return context


def _read(path: Path, source: str) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"kubernetes: {source}: {path}: {why}; expected a readable file") from error


def _named(data: Any, plural: str, kind: str, name: Any, path: Path) -> dict[str, Any]:
    """Find an entry of a kubeconfig by its name."""
    entries = data.get(plural) or () if isinstance(data, dict) else ()
    for entry in entries:
        if isinstance(entry, dict) and entry.get("name") == name and isinstance(entry.get(kind), dict):
            found: dict[str, Any] = entry[kind]
            return found
    names = ", ".join(str(entry.get("name")) for entry in entries if isinstance(entry, dict)) or "none"
    raise ConfigError(
        f"{path}: {plural} has no {name!r}, but {names}; kubectl config use-context NAME chooses one"
    )


def _pem(entry: dict[str, Any], key: str, path: Path) -> Pem | None:
    """Give what a kubeconfig's entry names, or has inside."""
    if f"{key}-data" in entry:
        try:
            return base64.b64decode(entry[f"{key}-data"], validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: {key}-data: {error}; expected PEM in base64") from error
    return path.parent / entry[key] if key in entry else None


def _as_file(pem: Pem, stack: ExitStack) -> Path:
    """Give a file for OpenSSL, which reads nothing else; content is in a private one until `stack` ends."""
    if isinstance(pem, Path):
        return pem
    file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-kube-")), "content.pem")
    file.write_bytes(pem)
    return file
