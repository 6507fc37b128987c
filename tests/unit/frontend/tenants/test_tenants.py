"""Tenants by key, their priorities and salts, and a key file that changes."""

import asyncio
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.core.files import RELOAD_S
from penstock.frontend.tenants.api_key import hash_of
from penstock.frontend.tenants.key_file import TenantConfig
from penstock.frontend.tenants.tenants import Tenant, Tenants


def text_of(**keys: str) -> str:
    return f"tenants: {{{', '.join(f'{name}: {{keys: [{hash_of(key)!r}]}}' for name, key in keys.items())}}}"


def named(tenants: Tenants, key: str) -> str | None:
    tenant = tenants.of_key(key.encode())
    tenants.check()
    return None if tenant is None else tenant.name


def test_each_key_has_its_tenant() -> None:
    keys = {f"key-{number}": f"t{number % 40}" for number in range(100)}
    configs = {
        name: TenantConfig(keys=tuple(hash_of(key) for key, owner in keys.items() if owner == name))
        for name in sorted(set(keys.values()))
    }
    tenants = Tenants(configs)
    assert tenants.ask_for_keys
    assert {key: named(tenants, key) for key in keys} == keys
    for key in ("", "key-100", "key-1 ", hash_of("key-1")):
        assert named(tenants, key) is None
    assert not Tenants({}).ask_for_keys
    assert Tenants({"idle": TenantConfig()}).ask_for_keys, "a file without keys does not open the server"


def tenant_of(tenants: Tenants, name: str) -> Tenant:
    """Give the tenant whose key is its name."""
    tenant = tenants.of_key(name.encode())
    assert tenant is not None
    return tenant


def test_salts_are_the_tenants_own_and_cannot_be_guessed() -> None:
    salt = {"a": None, "b": None, "c": "shared", "d": "shared", "e": ""}
    configs = {name: TenantConfig(keys=(hash_of(name),), cache_salt=each) for name, each in salt.items()}
    one, same, other = (Tenants(configs, secret=bytes(15) + last) for last in (b"0", b"0", b"1"))
    salts = {name: tenant_of(one, name).cache_salt for name in configs}
    assert salts["c"] == salts["d"]
    assert salts["e"] == ""
    assert len(set(salts.values())) == 4
    assert salts == {name: tenant_of(same, name).cache_salt for name in configs}
    assert all(tenant_of(other, name).cache_salt != salts[name] for name in "abcd")


def test_a_gateway_speaks_for_other_tenants() -> None:
    configs = {
        "edge": TenantConfig(keys=(hash_of("edge"),), trusted=True, concurrency=5),
        "known": TenantConfig(keys=(hash_of("known"),), priority="low", concurrency=7),
    }
    tenants = Tenants(configs)
    gateway = tenant_of(tenants, "edge")
    assert tenants.acting(gateway, "") == gateway
    known = tenants.acting(gateway, "known")
    assert (known.name, known.priority, known.priority_max) == ("known", -1, 1000)
    assert known.usage is tenant_of(tenants, "known").usage
    unknown = tenants.acting(gateway, "unknown")
    assert (unknown.name, unknown.usage) == ("unknown", gateway.usage)
    assert unknown.cache_salt == gateway.cache_salt


async def test_a_changed_file_counts_at_once_and_a_wrong_one_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    file = tmp_path / "keys.yaml"

    def write(text: str) -> None:
        """Replace the file, as editors and Kubernetes do."""
        new = tmp_path / "new"
        new.write_text(text)
        os.utime(new, ns=(0, write.count))
        write.count += 1
        new.replace(file)

    write.count = 1
    write(text_of(a="first", b="second"))
    tenants = Tenants.read(str(file))
    watching = asyncio.ensure_future(tenants.watch())
    a = tenants.of_key(b"first")
    assert a is not None
    assert a.usage is not None
    use = a.usage.admit(0.0)
    write(text_of(a="third", c="fourth"))
    assert named(tenants, "first") == "a"
    await asyncio.sleep(RELOAD_S + 0.1)
    assert [named(tenants, key) for key in ("first", "second", "third", "fourth")] == [None, None, "a", "c"]
    again = tenants.of_key(b"third")
    assert again is not None
    assert again.usage is a.usage, "what it uses still counts"
    assert a.usage.inflight == 1
    with capture_logs() as logs:
        write("tenants: {a: {keys: [plain]}}")
        await asyncio.sleep(3 * RELOAD_S)
        file.unlink()
        await asyncio.sleep(3 * RELOAD_S)
    told, missing = logs
    assert (told["event"], told["log_level"]) == ("api_keys_not_reloaded", "error")
    assert (missing["event"], missing["files"]) == ("watched_file_missing", [str(file)])
    assert "plain" not in told["error"]
    assert named(tenants, "third") == "a", "the keys before stay valid"
    write(text_of(c="fourth"))
    await asyncio.sleep(RELOAD_S + 0.1)
    assert [named(tenants, key) for key in ("third", "fourth")] == [None, "c"]
    use.end(0.0)
    watching.cancel()
