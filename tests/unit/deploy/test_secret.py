import pytest

from penstock.core.errors import ConfigError
from penstock.deploy.identity import SECRET_VARIABLE, deployment_secret, shared_hash_key
from penstock.graph.runtime import RuntimeSpec

SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def no_secret(monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


def test_one_host_has_a_random_secret():
    first, second = deployment_secret(RuntimeSpec()), deployment_secret(RuntimeSpec())
    assert len(first) == 32
    assert first != second


@pytest.mark.parametrize("place", ["hub", "join", "listen"])
def test_where_others_connect_it_must_be_given(place, monkeypatch):
    spec = RuntimeSpec(**{place: "tcp://10.0.0.1:7400"})
    with pytest.raises(ConfigError, match=r"set runtime.secret_file or PENSTOCK_SECRET"):
        deployment_secret(spec)
    monkeypatch.setenv(SECRET_VARIABLE, f" {SECRET}\n")
    assert deployment_secret(spec) == SECRET.encode()


def test_a_file_wins_over_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "of the environment")
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    assert deployment_secret(RuntimeSpec(secret_file=str(file))) == SECRET.encode()


@pytest.mark.parametrize(
    ("content", "error"),
    [(None, "no such file"), (b"short", "has 5 characters"), (b"\xff" * 20, "not UTF-8")],
)
def test_a_bad_file_is_named(tmp_path, content, error):
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=error) as refused:
        deployment_secret(RuntimeSpec(secret_file=str(file)))
    assert str(file) in refused.value.message


def test_hosts_derive_the_same_hash_key_and_deployments_different_ones():
    key = shared_hash_key(b"secret", "one")
    assert key == shared_hash_key(b"secret", "one")
    assert len({key, shared_hash_key(b"secret", "two"), shared_hash_key(b"other", "one")}) == 3
