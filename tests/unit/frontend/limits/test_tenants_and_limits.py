"""Tenants: their keys, priorities and salts, what is admitted and refused, and key files."""

import asyncio
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.core.errors import ConfigError
from penstock.core.files import RELOAD_S
from penstock.frontend.errors import RateLimitError
from penstock.frontend.limits.keys import TenantConfig, hash_of, new_key, read_tenants
from penstock.frontend.limits.tenants import Tenant, TenantKeys, TenantUsage, TokenBucket


def refused(usage: TenantUsage, now_s: float) -> RateLimitError:
    with pytest.raises(RateLimitError) as caught:
        usage.admit(now_s)
    usage.check()
    assert caught.value.http_status == 429
    return caught.value


def test_a_bucket_fills_at_its_rate_up_to_its_burst_and_debts_are_paid_first() -> None:
    bucket = TokenBucket(2.0, 10.0, now_s=5.0)
    bucket.take(9.0, 5.0)
    assert bucket.level(5.0) == 1.0
    assert bucket.level(4.0) == 1.0, "time does not run back"
    bucket.take(11.0, 5.0)
    assert bucket.wait_s(1.0, 5.0) == pytest.approx(5.5)
    assert bucket.level(10.5) == pytest.approx(1.0)
    assert bucket.level(1e9) == 10.0
    bucket.take(-3.0, 1e9)
    assert bucket.level(1e9) == 10.0, "what is given back does not add to a full one"
    bucket.reset(1.0, 4.0, 1e9)
    assert bucket.level(1e9) == 4.0
    bucket.check()


def test_requests_past_the_rate_come_back_when_there_is_one() -> None:
    usage = TenantUsage("t", TenantConfig(requests_per_s=4), 0.0)
    for _ in range(4):
        usage.admit(0.0)
    error = refused(usage, 0.0)
    assert (error.limit, error.retry_after_s) == ("requests_per_s", pytest.approx(0.25))
    assert "tenant 't'" in error.message
    assert "its limit requests_per_s is 4" in error.message
    usage.admit(0.25)
    refused(usage, 0.25)
    slow = TenantUsage("t", TenantConfig(requests_per_s=0.1), 0.0)
    slow.admit(0.0)
    assert refused(slow, 0.0).retry_after_s == pytest.approx(10.0)
    assert usage.inflight == 5, "a refused request takes no place"


def test_no_more_than_so_many_are_in_flight() -> None:
    usage = TenantUsage("t", TenantConfig(concurrency=2), 0.0)
    first, _ = usage.admit(0.0), usage.admit(0.0)
    assert refused(usage, 0.0).limit == "concurrency"
    assert first.end(1.0) == (0, 0)
    assert first.end(1.0) == (0, 0)
    usage.admit(1.0)
    assert refused(usage, 1.0).limit == "concurrency"


def test_tokens_are_charged_as_expected_and_then_as_used() -> None:
    usage = TenantUsage("t", TenantConfig(tokens_per_min=6000), 0.0)
    use = usage.admit(0.0)
    use.charge(5000, 9000, lambda: (5000, 100), 0.0)
    assert usage.view(0.0).tokens_left == 6000 - 5000 - 256, "an answer of the usual length"
    assert use.end(0.0) == (5000, 100)
    assert usage.view(0.0).tokens_left == 900
    assert usage.mean_output_tokens == pytest.approx(256 - 156 / 16)
    short = usage.admit(0.0)
    short.charge(2000, 10, lambda: (2000, 10), 0.0)
    error = refused(usage, 0.0)
    assert (error.limit, error.retry_after_s) == ("tokens_per_min", pytest.approx(1111 / 100))
    short.end(0.0)
    usage.admit(11.2)


def test_other_limits_keep_what_was_used() -> None:
    usage = TenantUsage("t", TenantConfig(requests_per_s=2, concurrency=9), 0.0)
    usage.admit(0.0)
    usage.admit(0.0)
    usage.limit(TenantConfig(requests_per_s=1, concurrency=2), 0.0)
    assert refused(usage, 5.0).limit == "concurrency"
    usage.limit(TenantConfig(requests_per_s=1), 5.0)
    usage.admit(5.0)
    assert refused(usage, 5.0).limit == "requests_per_s"
    usage.limit(TenantConfig(), 5.0)
    for _ in range(1000):
        usage.admit(5.0)


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


def text_of(**keys: str) -> str:
    return f"tenants: {{{', '.join(f'{name}: {{keys: [{hash_of(key)!r}]}}' for name, key in keys.items())}}}"


def named(tenants: TenantKeys, key: str) -> str | None:
    tenant = tenants.of_key(key.encode())
    tenants.check()
    return None if tenant is None else tenant.name


def test_each_key_has_its_tenant() -> None:
    keys = {f"key-{number}": f"t{number % 40}" for number in range(100)}
    configs = {
        name: TenantConfig(keys=tuple(hash_of(key) for key, owner in keys.items() if owner == name))
        for name in sorted(set(keys.values()))
    }
    tenants = TenantKeys(configs)
    assert tenants.ask_for_keys
    assert {key: named(tenants, key) for key in keys} == keys
    for key in ("", "key-100", "key-1 ", hash_of("key-1")):
        assert named(tenants, key) is None
    assert not TenantKeys({}).ask_for_keys
    assert TenantKeys({"idle": TenantConfig()}).ask_for_keys, "a file without keys does not open the server"


def tenant_of(tenants: TenantKeys, name: str) -> Tenant:
    """Give the tenant whose key is its name."""
    tenant = tenants.of_key(name.encode())
    assert tenant is not None
    return tenant


def test_salts_are_the_tenants_own_and_cannot_be_guessed() -> None:
    salt = {"a": None, "b": None, "c": "shared", "d": "shared", "e": ""}
    configs = {name: TenantConfig(keys=(hash_of(name),), cache_salt=each) for name, each in salt.items()}
    one, same, other = (TenantKeys(configs, secret=bytes(15) + last) for last in (b"0", b"0", b"1"))
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
    tenants = TenantKeys(configs)
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
    tenants = TenantKeys.read(str(file))
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
