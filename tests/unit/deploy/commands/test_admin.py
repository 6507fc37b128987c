"""Commands that ask a running deployment: what they prove themselves by, and to whom."""

from pathlib import Path

import pytest

from penstock.deploy.commands.admin import _no_token, _secret_for, _wrong_token
from penstock.deploy.state import load_admin_token


def test_the_token_of_this_user_goes_to_this_machine_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    assert _secret_for("http://127.0.0.1:8000", "/admin/explain") == "", "commands make none"
    token = load_admin_token()
    for base in ("http://127.0.0.1:8000", "http://localhost:1", "http://[::1]:8000"):
        assert _secret_for(base, "/admin/explain/x") == token
    for base in ("http://192.0.2.7:8000", "http://example.com", "http://127.0.0.1.example.com"):
        assert _secret_for(base, "/admin/explain/x") == ""
    assert _secret_for("http://127.0.0.1:8100", "/explain") == ""
    monkeypatch.setenv("PENSTOCK_API_KEY", "key")
    assert _secret_for("http://127.0.0.1:8100", "/explain") == "key"
    monkeypatch.setenv("PENSTOCK_ADMIN_TOKEN", "given")
    assert _secret_for("http://example.com", "/admin/explain") == "given"


def test_a_missing_token_error_names_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_STATE_DIR", str(tmp_path))
    path = tmp_path / "admin_token"
    assert _no_token("http://127.0.0.1:8000") == (
        f"no admin token in {path}; run as the server's user, or set PENSTOCK_ADMIN_TOKEN"
    )
    assert _no_token("http://192.0.2.7:8000") == (
        f"the admin token in {path} is sent to this machine only; set PENSTOCK_ADMIN_TOKEN to that of the server"
    )


def test_a_wrong_token_error_names_its_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_ADMIN_TOKEN", raising=False)
    assert f"the admin token in {tmp_path / 'admin_token'}; set PENSTOCK_ADMIN_TOKEN" in _wrong_token()
    monkeypatch.setenv("PENSTOCK_ADMIN_TOKEN", "given")
    assert "the admin token in PENSTOCK_ADMIN_TOKEN; set it to that of the server" in _wrong_token()
