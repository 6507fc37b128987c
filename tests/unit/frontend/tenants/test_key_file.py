"""Key files: what is read, and what is refused without showing a key."""

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.frontend.tenants.api_key import hash_of, new_key
from penstock.frontend.tenants.key_file import TenantConfig, read_tenants

ONE, TWO = hash_of("one"), hash_of("two")


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)


def test_keys_come_from_a_file_and_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert read_tenants(None) == {}
    file = tmp_path / "keys.yaml"
    file.write_text(
        f"tenants:\n  search: {{keys: ['{ONE}', {TWO}], requests_per_s: 2.5, concurrency: 3}}\n  idle: {{}}\n"
    )
    search = TenantConfig(keys=(ONE, TWO), requests_per_s=2.5, concurrency=3)
    assert read_tenants(str(file)) == {"search": search, "idle": TenantConfig()}
    monkeypatch.setenv("PENSTOCK_API_KEY", " three ")
    assert read_tenants(None) == {"default": TenantConfig(keys=(hash_of("three"),), cache_salt="")}
    monkeypatch.setenv("PENSTOCK_API_KEY", hash_of("three"))
    file.write_text(f"tenants: {{default: {{keys: ['{ONE}'], concurrency: 1}}}}")
    joined = TenantConfig(keys=(ONE, hash_of("three")), concurrency=1)
    assert read_tenants(str(file)) == {"default": joined}, "limits of the file hold for the variable's key"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "must be a mapping"),
        ("the-secret\nanother-secret\n", "must be a mapping"),
        ("tenants: {}", "tenants: is empty"),
        ("tenants: {a: {keys: the-secret}}", "tenants.a.keys: must be a list; write the line `sha256:"),
        ("tenants: {a: {keys: [the-secret]}}", "number 1 is no `sha256:` with 64"),
        ("tenants: {a: {keys: [12345]}}", "number 1 is no `sha256:` with 64"),
        (f"tenants: {{a: {{keys: ['{ONE}', '{ONE[:-1]}']}}}}", "number 2 is no `sha256:`"),
        (
            f"tenants: {{a: {{keys: ['{ONE}']}}, b: {{keys: ['{ONE}']}}}}",
            "'b' and 'a' have the same key sha256:",
        ),
        ("tenants: {a: {}, a: {}}", "key 'a' is written twice"),
        ("tenants: {a: {request_per_s: 1}}", "did you mean 'requests_per_s'"),
        ("tenants: {a: {requests_per_s: 0}}", "tenants.a.requests_per_s: must be >= 1e-06"),
        ("tenants: {a: {requests_per_s: 1.0e-320}}", "tenants.a.requests_per_s: must be >= 1e-06"),
        ("tenants: {a: {concurrency: 0}}", "tenants.a.concurrency: must be >= 1"),
        ("tenants: {a: {priority: urgent}}", "tenants.a.priority: must be one of 'high', 'normal' or 'low'"),
        ("tenants: {'': {}}", "a name must have 1 to 256"),
        ("tenants: [", "keys.yaml"),
        ("tenants: " + "[" * 5000, "exceeded maximum nesting depth"),
    ],
)
def test_wrong_files_are_named_and_no_key_is_shown(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as wrong:
        read_tenants(str(file))
    assert says in wrong.value.message
    assert wrong.value.message.startswith(f"api_key_file: {file}")
    assert "the-secret" not in wrong.value.message
    assert "12345" not in wrong.value.message


def test_files_that_cannot_be_read_and_keys_that_cannot_be_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_tenants(str(tmp_path / "none"))
    file = tmp_path / "keys.yaml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no UTF-8"):
        read_tenants(str(file))
    file.write_bytes(b"#" * (5 << 20))
    with pytest.raises(ConfigError, match="is larger than"):
        read_tenants(str(file))
    for key, says in (
        ("a b", "character 2 is ' '"),
        ("é", r"character 1 is '\\xe9'"),
        ("k" * 513, "one of 513"),
    ):
        monkeypatch.setenv("PENSTOCK_API_KEY", key)
        with pytest.raises(ConfigError, match=f"PENSTOCK_API_KEY: .*{says}"):
            read_tenants(None)


def test_new_keys_are_random_and_fit_a_header() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) > 40 and key.startswith("sk-") and key.isascii() and " " not in key for key in keys)
