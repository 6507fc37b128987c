"""Who a process is to an API server: service accounts, kubeconfigs, and what is wrong with them."""

import base64
from pathlib import Path

import pytest
import yaml

from penstock.core.errors import ConfigError
from penstock.runtime.kubernetes import KubernetesAccess
from tests.support.certificates import make_authority, make_certificate


def kubeconfig(tmp_path, *, user=None, cluster=None, **fields):
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "models"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:8001", **(cluster or {})}}],
        "users": [{"name": "u", "user": {"token": "t", **(user or {})}}],
        **fields,
    }
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_pod_uses_its_service_account(tmp_path):
    for name, text in (("namespace", "models\n"), ("token", "abc\n")):
        (tmp_path / name).write_text(text)
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(ConfigError, match=r"ca\.crt"):
        KubernetesAccess.find(environment, service_account=tmp_path)


def test_a_kubeconfig_wins_over_the_service_account(tmp_path):
    path = kubeconfig(tmp_path)
    access = KubernetesAccess.find({"KUBECONFIG": str(path), "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert access.server == "http://127.0.0.1:8001"
    assert access.namespace == "models"
    assert access.headers() == {"Authorization": "Bearer t"}
    assert access.context() is None


def test_a_token_file_is_read_again(tmp_path):
    file = tmp_path / "token"
    file.write_text("first\n")
    access = KubernetesAccess("http://127.0.0.1:1", namespace="models", token_file=file)
    assert access.headers() == {"Authorization": "Bearer first"}
    (tmp_path / "next").write_text("second\n")
    (tmp_path / "next").replace(file)
    assert access.headers() == {"Authorization": "Bearer second"}
    file.unlink()  # for a moment, as while a directory behind a link is replaced
    assert access.headers() == {"Authorization": "Bearer second"}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"current-context": "there"}, r"contexts has no 'there', but here"),
        ({"current-context": None}, r"kubectl config use-context"),
        ({"clusters": []}, r"clusters has no 'c', but none"),
        ({"user": {"exec": {"command": "aws"}}}, r"exec is not supported; use a token"),
        ({"user": {"username": "admin"}}, r"username is not supported"),
        ({"cluster": {"server": "127.0.0.1"}}, r"server must be https://HOST:PORT, got '127.0.0.1'"),
        ({"cluster": {"server": "https://h", "certificate-authority": "no.pem"}}, r"no.pem: .*no such file"),
    ],
)
def test_what_a_kubeconfig_lacks_is_said(tmp_path, changes, what):
    with pytest.raises(ConfigError, match=f"(?i){what}"):
        KubernetesAccess.of_config(kubeconfig(tmp_path, **changes))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Give the only place for temporary files."""
    made = tmp_path / "temporary"
    made.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(made))
    return made


@pytest.mark.parametrize("entry", ["certificate-authority", "client-certificate", "client-key"])
@pytest.mark.parametrize("data", ["no base64!", 7, None, [1]])
def test_content_that_is_no_base64_is_said(tmp_path, folder, entry, data):
    pair = {
        f"client-{name}-data": base64.b64encode(b"a secret key").decode() for name in ("key", "certificate")
    }
    user = {**pair, **({f"{entry}-data": data} if entry in {"client-certificate", "client-key"} else {})}
    cluster = {"server": "https://h", **({f"{entry}-data": data} if entry.startswith("cert") else {})}
    with pytest.raises(ConfigError, match=f"{entry}-data: .*expected PEM in base64"):
        KubernetesAccess.of_config(kubeconfig(tmp_path, cluster=cluster, user=user))
    assert not list(folder.iterdir())


def test_content_that_is_no_certificate_is_said_and_leaves_no_file(tmp_path, folder):
    data = base64.b64encode(b"a secret key").decode()
    cluster = {"server": "https://h", "certificate-authority-data": data}
    with pytest.raises(ConfigError, match=r"certificate-authority-data: .*expected PEM"):
        KubernetesAccess.of_config(kubeconfig(tmp_path, cluster=cluster))
    user = {"client-certificate-data": data, "client-key-data": data}
    with pytest.raises(ConfigError, match="client-key-data"):
        KubernetesAccess.of_config(kubeconfig(tmp_path, cluster={"server": "https://h"}, user=user))
    assert not list(folder.iterdir())


def test_a_key_inside_a_kubeconfig_is_in_no_file_once_it_is_read(tmp_path, folder):
    made = make_certificate(tmp_path, "client", make_authority(tmp_path, "authority"))
    user = {
        f"client-{name}-data": base64.b64encode(Path(file).read_bytes()).decode()
        for name, file in (("certificate", made.certificate), ("key", made.key))
    }
    access = KubernetesAccess.of_config(kubeconfig(tmp_path, cluster={"server": "https://h"}, user=user))
    assert access.context() is not None
    assert not list(folder.iterdir())


def test_nowhere_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"this is no pod .* set KUBECONFIG"):
        KubernetesAccess.find({})
    with pytest.raises(ConfigError, match=r"KUBECONFIG: .*none: No such file"):
        KubernetesAccess.find({"KUBECONFIG": str(tmp_path / "none")})
