"""API keys and the admin token."""

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.frontend.errors import AdminTokenError, ApiKeyError
from penstock.frontend.limits.access import Access, load_api_keys


def test_without_a_token_admin_is_closed_and_without_keys_the_api_is_open() -> None:
    access = Access()
    access.check_api({})
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer x"}):
        with pytest.raises(AdminTokenError):
            access.check_admin(headers)


def test_bearer_is_read_as_clients_write_it() -> None:
    access = Access(api_keys=["key"], admin_token="token")
    for value in ("Bearer key", "bearer key", "BEARER  key "):
        access.check_api({"Authorization": value})
    for value in (
        "key",
        "Basic key",
        "Bearer key2",
        "Bearer ke",
        "Bearer",
        "Bearer k\udcffy",
        "Bearer token",
    ):
        with pytest.raises(ApiKeyError) as refused:
            access.check_api({"Authorization": value})
        assert refused.value.http_status == 401
    access.check_admin({"Authorization": "Bearer token"})
    with pytest.raises(AdminTokenError):
        access.check_admin({"Authorization": "Bearer key"})


def test_keys_come_from_a_file_and_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    assert load_api_keys(None) == ()
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    assert load_api_keys(str(file)) == ("one", "two")
    monkeypatch.setenv("PENSTOCK_API_KEY", "three")
    assert load_api_keys(str(file)) == ("three", "one", "two")
    assert load_api_keys(None) == ("three",)
    for content, says in (
        ("\n", "is empty"),
        ("a b\n", r"keys:1: .*without spaces; character 2 is ' '"),
        ("one\n\né\n", r"keys:3: .*ASCII.*; character 1 is '\\xe9'"),
        ("k" * 5000, r"keys:1: .*, got one of 5,000"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=says) as wrong:
            load_api_keys(str(file))
        assert "a b" not in wrong.value.message, "a log is no place for keys"
    with pytest.raises(ConfigError, match="No such file"):
        load_api_keys(str(tmp_path / "none"))
