"""Accounts of registries: from a file or a variable, read again, and never shown."""

import pytest

from penstock.core.errors import ConfigError
from penstock.runtime.credentials import Credentials, Nkey, Password, Token

SEED = "SUAGWISH6Y72ZFPA5ECSO3LXLL7XUYPEAQOKXVUP3JSPR2FU3MIHCYBE7M"
CREDS = (
    "-----BEGIN NATS USER JWT-----\neyJ0.eyJq.x-y_z\n------END NATS USER JWT------\n\n*** IMPORTANT ***\n\n"
    f"-----BEGIN USER NKEY SEED-----\n{SEED}\n------END USER NKEY SEED------\n\n***\n"
)
FIELD, VARIABLE = "runtime.registry_credentials_file", "A_VARIABLE"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def credentials(path):
    return Credentials(None if path is None else str(path), field=FIELD, variable=VARIABLE)


@pytest.mark.parametrize(
    ("text", "account"),
    [
        ("penstock:a:word with #\r\n", Password("penstock", "a:word with #")),
        ("a-token\n", Token("a-token")),
        (f"{SEED}\n", Nkey(SEED)),
        (CREDS, Nkey(SEED, "eyJ0.eyJq.x-y_z")),
        (CREDS.replace("\n", "\r\n"), Nkey(SEED, "eyJ0.eyJq.x-y_z")),
    ],
)
def test_a_file_or_a_variable_has_an_account(tmp_path, monkeypatch, text, account):
    file = tmp_path / "account"
    file.write_bytes(text.encode())
    assert credentials(file).read() == account
    monkeypatch.setenv(VARIABLE, text)
    assert credentials(None).read() == account
    assert not any(hidden in repr(account) for hidden in ("a:word", "a-token", SEED, "eyJ"))


def test_none_is_given():
    assert credentials(None).read() is None


def test_a_file_wins_and_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "of the environment")
    file = tmp_path / "account"
    file.write_text("penstock:first")
    given = credentials(file)
    file.write_text("penstock:second")
    assert given.read() == Password("penstock", "second")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"\xff", "not UTF-8"),
        (b"\n", "has 1 lines; expected one line USER:PASSWORD"),
        (b"penstock\nhidden", "has 2 lines"),
        (b":hidden", "has no user"),
        (b"penstock:", "has no password"),
        (CREDS.partition("***")[0].encode(), "lacks a user's JWT or its seed"),
        (CREDS.replace("SUAG", "SAAG").encode(), "lacks a user's JWT or its seed"),
    ],
)
def test_a_bad_file_is_named_and_not_shown(tmp_path, content, said):
    file = tmp_path / "account"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as refused:
        credentials(file)
    assert refused.value.message.startswith(f"{FIELD}: {file}: ")
    assert "hidden" not in refused.value.message
    assert "eyJ" not in refused.value.message
