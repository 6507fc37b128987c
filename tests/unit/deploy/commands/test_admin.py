"""Commands that ask a running deployment: what they prove themselves by, and to whom."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from penstock.core.errors import ConfigError, RequestError, Unavailable
from penstock.deploy.commands.admin import _no_token, _secret_for, _wrong_token, ask
from penstock.deploy.control.frontend_address import FrontendAddress
from penstock.deploy.state import load_admin_token
from tests.support.certificates import make_authority, make_certificate

T = TypeVar("T")


def test_the_token_of_this_user_goes_to_this_machine_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    assert _secret_for(FrontendAddress("http://127.0.0.1:8000"), "/admin/explain") == "", "commands make none"
    token = load_admin_token()
    for base in ("http://127.0.0.1:8000", "http://localhost:1", "http://[::1]:8000"):
        assert _secret_for(FrontendAddress(base), "/admin/explain/x") == token
    for base in ("http://192.0.2.7:8000", "http://example.com", "http://127.0.0.1.example.com"):
        assert _secret_for(FrontendAddress(base), "/admin/explain/x") == ""
    guess = FrontendAddress("http://127.0.0.1:8000", is_guess=True)
    assert _secret_for(guess, "/admin/explain/x") == "", "who listens there may be anybody"
    assert _secret_for(FrontendAddress("http://127.0.0.1:8100"), "/explain") == ""
    monkeypatch.setenv("PENSTOCK_API_KEY", "key")
    assert _secret_for(FrontendAddress("http://127.0.0.1:8100"), "/explain") == "key"
    monkeypatch.setenv("PENSTOCK_ADMIN_TOKEN", "given")
    assert _secret_for(FrontendAddress("http://example.com"), "/admin/explain") == "given"


def test_a_missing_token_error_names_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_STATE_DIR", str(tmp_path))
    path = tmp_path / "admin_token"
    assert _no_token(FrontendAddress("http://127.0.0.1:8000")) == (
        f"no admin token in {path}; run as the server's user, or set PENSTOCK_ADMIN_TOKEN"
    )
    assert _no_token(FrontendAddress("http://192.0.2.7:8000")) == (
        f"the admin token in {path} is sent to this machine only; set PENSTOCK_ADMIN_TOKEN to that of the server"
    )
    assert _no_token(FrontendAddress("http://127.0.0.1:8000", is_guess=True)) == (
        f"no deployment of this user was found on this host, so http://127.0.0.1:8000 was not sent the admin token in {path};"
        " if it is yours, repeat with --url http://127.0.0.1:8000"
    )


@pytest.mark.parametrize("redirects", [True, False])
def test_no_key_goes_to_another_server_by_a_redirect_or_a_proxy(
    monkeypatch: pytest.MonkeyPatch, *, redirects: bool
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "key")
    others: list[bytes] = []

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        others.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
        writer.close()

    async def asked() -> bytes:
        async with await asyncio.start_server(other, "127.0.0.1", 0) as stranger:
            strange = f"http://127.0.0.1:{stranger.sockets[0].getsockname()[1]}"

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                assert b"Authorization: Bearer key" in await reader.readuntil(b"\r\n\r\n")
                first = f"302 Found\r\nLocation: {strange}/x" if redirects else "200 OK"
                head = f"HTTP/1.1 {first}\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
                writer.write(head.encode())
                writer.close()

            async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
                url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
                monkeypatch.setenv("http_proxy", strange)
                monkeypatch.delenv("no_proxy", raising=False)
                return await asyncio.to_thread(ask, FrontendAddress(url), "/v1/models", timeout_s=30.0)

    if redirects:
        with pytest.raises(RequestError, match=r"redirects to 'http.*/x'.*; name the server itself by --url"):
            asyncio.run(asked())
    else:
        assert asyncio.run(asked()) == b"ok"
    assert others == []


def test_a_wrong_token_error_names_its_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_ADMIN_TOKEN", raising=False)
    assert f"the admin token in {tmp_path / 'admin_token'}; set PENSTOCK_ADMIN_TOKEN" in _wrong_token()
    monkeypatch.setenv("PENSTOCK_ADMIN_TOKEN", "given")
    assert "the admin token in PENSTOCK_ADMIN_TOKEN; set it to that of the server" in _wrong_token()


def test_a_server_that_speaks_otherwise_is_not_called_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    files = make_certificate(tmp_path, "one", make_authority(tmp_path, "authority"))
    assert files.certificate is not None
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(files.certificate, files.key)

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read(1)
            writer.close()

    async def failures() -> tuple[str, str, str]:
        async with (
            await asyncio.start_server(close, "127.0.0.1", 0, ssl=tls) as encrypted,
            await asyncio.start_server(close, "127.0.0.1", 0) as plain,
        ):
            secure, clear = (each.sockets[0].getsockname()[1] for each in (encrypted, plain))
            found = [
                await asyncio.to_thread(failure, f"{base}{port}")
                for base, port in (
                    ("https://127.0.0.1:", secure),
                    ("http://127.0.0.1:", clear),
                    ("https://127.0.0.1:", clear),
                )
            ]
        return found[0], found[1], found[2]

    untrusted, no_http, no_tls = asyncio.run(failures())
    assert "its certificate is not trusted (" in untrusted
    assert "set SSL_CERT_FILE" in untrusted
    assert "no answer in HTTP (" in no_http
    assert "use https://" in no_http
    assert "no TLS connection (" in no_tls
    assert "penstock ps" in failure("http://127.0.0.1:1")
    assert failure(FrontendAddress("http://127.0.0.1:1", name="blue")).startswith(
        "blue at http://127.0.0.1:1: nobody answers"
    )
    assert failure(FrontendAddress("http://127.0.0.1:1", is_guess=True)) == (
        "no deployment of this user has a frontend on this host, and nobody answers at http://127.0.0.1:1 ([Errno 111]"
        " Connection refused); start one with penstock serve, or name a server by --url"
    )


def test_a_certificate_is_trusted_by_itself_also_where_an_authority_signed_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_STATE_DIR", str(tmp_path))
    files = make_certificate(tmp_path, "one", make_authority(tmp_path, "authority"), address="127.0.0.1")
    assert files.certificate is not None
    assert files.authority is not None
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(files.certificate, files.key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            await writer.drain()
        writer.close()

    async def asked() -> bytes:
        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as server:
            base = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await asyncio.to_thread(ask, FrontendAddress(base), "/health", timeout_s=30.0)

    for trusted in (files.certificate, files.authority):
        monkeypatch.setenv("SSL_CERT_FILE", trusted)
        assert asyncio.run(asked()) == b"{}"


def test_a_deployment_of_this_host_is_known_by_its_own_certificate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its host name does not count, and no other certificate of its authority is trusted."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    authority = make_authority(tmp_path, "authority")
    one, other = (make_certificate(tmp_path, name, authority) for name in ("one", "other"))
    expired = make_certificate(tmp_path, "expired", authority, days=-1)
    chain = tmp_path / "chain.pem"
    assert one.certificate is not None
    chain.write_text(Path(one.certificate).read_text() + authority.read_text())

    def ask_with(certificate: str | Path | None) -> Callable[[str], str]:
        assert certificate is not None
        return lambda url: ask(FrontendAddress(url, name="blue", certificate=Path(certificate)), "/").decode()

    def served(url: str) -> list[str]:
        said = [ask_with(one.certificate)(url), ask_with(chain)(url)]
        with pytest.raises(Unavailable, match=r"blue at https.*: its certificate is refused \("):
            ask_with(other.certificate)(url)
        with pytest.raises(ConfigError, match=r"one\.key cannot be read: .*run as the deployment's user"):
            ask_with(one.key)(url)
        return said

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
            writer.close()

    async def with_server(certificate: str | Path, key: str | None, call: Callable[[str], T]) -> T:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate, key)
        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as server:
            return await asyncio.to_thread(call, f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    assert asyncio.run(with_server(chain, one.key, served)) == ["ok", "ok"]
    assert expired.certificate is not None
    with pytest.raises(Unavailable, match=r"certificate has expired\); renew .*expired.pem"):
        asyncio.run(with_server(expired.certificate, expired.key, ask_with(expired.certificate)))


def failure(server: str | FrontendAddress) -> str:
    server = FrontendAddress(server) if isinstance(server, str) else server
    with pytest.raises(Unavailable) as caught:
        ask(server, "/health", timeout_s=30.0)
    return caught.value.message
