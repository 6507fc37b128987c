"""Commands that ask a running deployment: what they prove themselves by, and to whom."""

from pathlib import Path

import pytest

from penstock.cli.admin import ask
from penstock.core.errors import ConfigError, PenstockError, RequestError, Unavailable
from penstock.deploy.control.local_connector import FrontendAddress
from penstock.deploy.state import load_admin_token
from tests.support.answering import Answers, answering
from tests.support.certificates import make_authority, make_certificate


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Give this user a state directory, and an environment without secrets."""
    monkeypatch.setenv("PENSTOCK_STATE_DIR", str(tmp_path))
    for name in ("PENSTOCK_ADMIN_TOKEN", "PENSTOCK_API_KEY", "SSL_CERT_FILE", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def refused(server: FrontendAddress, path: str = "/health") -> str:
    with pytest.raises(PenstockError) as caught:
        ask(server, path, timeout_s=30.0)
    return caught.value.message


def test_the_token_of_this_user_goes_to_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(Answers()) as server:
        monkeypatch.setenv("http_proxy", server.url)  # who asks another machine asks this server
        here, guess = FrontendAddress(server.url), FrontendAddress(server.url, is_guess=True)
        elsewhere = [FrontendAddress(f"http://{host}") for host in ("192.0.2.7", "127.0.0.1.example.com")]

        def told(address: FrontendAddress, path: str) -> str:
            ask(address, path, timeout_s=30.0)
            return server.asked[-1][1].removeprefix("Bearer ")

        assert told(here, "/admin/explain") == "", "commands make none"
        token = load_admin_token()
        assert told(here, "/admin/explain/x") == token
        assert [told(each, "/admin/explain/x") for each in elsewhere] == ["", ""]
        assert told(guess, "/admin/explain/x") == "", "who listens there may be anybody"
        assert told(here, "/explain") == ""
        monkeypatch.setenv("PENSTOCK_API_KEY", "key")
        assert told(here, "/explain") == "key"
        monkeypatch.setenv("PENSTOCK_ADMIN_TOKEN", "given")
        assert told(elsewhere[0], "/admin/explain") == "given"


def test_a_refusal_names_the_token_that_was_sent_or_is_missing(
    monkeypatch: pytest.MonkeyPatch, state: Path
) -> None:
    path = state / "admin_token"
    with answering(Answers(status=401)) as server:
        here, guess = FrontendAddress(server.url), FrontendAddress(server.url, is_guess=True)
        assert refused(here, "/admin/x") == (
            f"no admin token in {path}; run as the server's user, or set PENSTOCK_ADMIN_TOKEN"
        )
        assert f"{server.url} was not sent the admin token in {path}" in refused(guess, "/admin/x")
        load_admin_token()
        assert f"the admin token in {path}; set PENSTOCK_ADMIN_TOKEN" in refused(here, "/admin/x")
        monkeypatch.setenv("http_proxy", server.url)
        assert "is sent to this machine only" in refused(FrontendAddress("http://192.0.2.7"), "/admin/x")
        monkeypatch.setenv("PENSTOCK_ADMIN_TOKEN", "given")
        assert "the admin token in PENSTOCK_ADMIN_TOKEN; set it to that" in refused(here, "/admin/x")


def test_no_key_goes_to_another_server_by_a_redirect_or_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "key")
    with answering(Answers()) as stranger, answering(Answers()) as server:
        monkeypatch.setenv("http_proxy", stranger.url)
        assert ask(FrontendAddress(server.url), "/v1/models", timeout_s=30.0) == b"ok"
        server.status, server.headers = 302, {"Location": f"{stranger.url}/x"}
        with pytest.raises(RequestError, match=r"redirects to 'http.*/x'.*; name the server itself by --url"):
            ask(FrontendAddress(server.url), "/v1/models", timeout_s=30.0)
        assert [secret for _, secret in server.asked] == ["Bearer key"] * 2
        assert stranger.asked == []


@pytest.mark.needs("openssl")
def test_a_server_that_speaks_otherwise_is_not_called_away(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "one", make_authority(tmp_path, "authority"))
    with answering(Answers(), (files.certificate, files.key)) as secure, answering(Answers()) as clear:
        for url, texts in (
            (secure.url, ("its certificate is not trusted (", "set SSL_CERT_FILE")),
            (secure.url.replace("https:", "http:"), ("no answer in HTTP (", "use https://")),
            (clear.url.replace("http:", "https:"), ("no TLS connection (",)),
            ("http://127.0.0.1:1", ("nobody answers", "penstock ps")),
        ):
            said = refused(FrontendAddress(url))
            assert all(text in said for text in texts), said
    named = FrontendAddress("http://127.0.0.1:1", name="blue")
    assert refused(named).startswith("blue at http://127.0.0.1:1: nobody answers")
    guess = FrontendAddress("http://127.0.0.1:1", is_guess=True)
    assert refused(guess).startswith("no deployment of this user has a frontend on this host, and nobody")


@pytest.mark.needs("openssl")
def test_a_certificate_is_trusted_by_itself_or_by_its_authority(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = make_certificate(tmp_path, "one", make_authority(tmp_path, "authority"), address="127.0.0.1")
    with answering(Answers(), (files.certificate, files.key)) as server:
        for trusted in (files.certificate, files.authority):
            monkeypatch.setenv("SSL_CERT_FILE", trusted)
            assert ask(FrontendAddress(server.url), "/health", timeout_s=30.0) == b"ok"


@pytest.mark.needs("openssl")
def test_a_deployment_of_this_host_is_known_by_its_own_certificate(tmp_path: Path) -> None:
    """Its host name does not count, and no other certificate of its authority is trusted."""
    authority = make_authority(tmp_path, "authority")
    one, other = (make_certificate(tmp_path, name, authority) for name in ("one", "other"))
    expired = make_certificate(tmp_path, "expired", authority, days=-1)
    chain = tmp_path / "chain.pem"
    chain.write_text(Path(one.certificate).read_text() + authority.read_text())

    def asked(url: str, certificate: Path | str) -> bytes:
        return ask(FrontendAddress(url, name="blue", certificate=Path(certificate)), "/", timeout_s=30.0)

    with answering(Answers(), (str(chain), one.key)) as server:
        assert asked(server.url, one.certificate) == asked(server.url, chain) == b"ok"
        with pytest.raises(Unavailable, match=r"blue at https.*: its certificate is refused \("):
            asked(server.url, other.certificate)
        with pytest.raises(ConfigError, match=r"one\.key cannot be read: .*run as the deployment's user"):
            asked(server.url, one.key)
    with (
        answering(Answers(), (expired.certificate, expired.key)) as server,
        pytest.raises(Unavailable, match=r"certificate has expired\); renew .*expired.pem"),
    ):
        asked(server.url, expired.certificate)
