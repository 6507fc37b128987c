"""Accounts of registries in manifests: by reference to a Secret, a variable or a mounted file, and never their text."""

from pathlib import Path

import pytest

from penstock.deploy.manifests.options import RenderOptions
from penstock.deploy.manifests.pod_graph import dump_all
from penstock.deploy.manifests.slurm import slurm_script
from penstock.graph import build
from tests.support.rendered import objects_of, pods

VARIABLES = {
    "PENSTOCK_REGISTRY_CREDENTIALS": "registry-credentials",
    "PENSTOCK_EVENT_CREDENTIALS": "event-credentials",
}
RUNTIME = {
    "discovery": "etcd", "urls": ["https://etcd:2379"], "events": "nats", "event_urls": ["tls://nats:4222"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def given(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "penstock:hidden")


def graph_of(**fields):
    return build({"name": "chat", "model": "demo", "runtime": RUNTIME | fields})


def test_pods_read_them_from_the_secret():
    objects = objects_of(graph_of())
    assert "hidden" not in dump_all(objects)
    for template in pods(objects).values():
        environment = {each["name"]: each for each in template["spec"]["containers"][0]["env"]}
        for variable, key in VARIABLES.items():
            reference = environment[variable]["valueFrom"]["secretKeyRef"]
            assert reference == {"name": "chat-secret", "key": key, "optional": True}
    other = dump_all(objects_of(build({"name": "chat", "model": "demo"})))
    assert not any(variable in other for variable in VARIABLES)


def test_slurm_takes_them_from_the_environment():
    assert "hidden" not in slurm_script(graph_of(), RenderOptions())


def test_files_are_mounted(tmp_path: Path):
    graph = graph_of(
        registry_credentials_file="/etc/accounts/etcd", event_credentials_file="/etc/accounts/nats.creds"
    )
    objects = objects_of(graph, mounts=[{"path": "/etc/accounts", "kind": "secret", "name": "accounts"}])
    text = dump_all(objects)
    assert not any(variable in text for variable in VARIABLES)
