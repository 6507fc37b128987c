"""What is remembered of a deployment's scale."""

import pytest

from penstock.core.types.instances import Role
from penstock.deploy.control.hosted import DeploymentOrigin, unnamed_file
from penstock.deploy.supervisor.scale_file import KeptWorker, ScaleFile
from penstock.graph import Graph

DECLARED = {Role.AGGREGATED: 1}
TWO = tuple(KeptWorker(home=Role.AGGREGATED, index=index, role=Role.AGGREGATED) for index in range(2))


def test_what_was_saved_is_loaded(tmp_path):
    with ScaleFile(tmp_path, DECLARED) as file:
        assert file.load() is None
        file.save(TWO, revision=3, changed_by="me")
    with ScaleFile(tmp_path, DECLARED) as file:
        kept = file.load()
        assert (kept.workers, kept.revision, kept.changed_by) == (TWO, 3, "me")
    with ScaleFile(tmp_path, {Role.AGGREGATED: 2}) as file:
        assert file.load() is None, "the graph has changed"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"version": 1, "declared": {"aggr',
        b'{"version": 2, "declared": {"aggregated": 1}, "workers": [], "revision": 1}',
        b'{"version": 1, "declared": {"aggregated": 1}, "workers": [], "revision": 1}',
    ],
)
def test_a_damaged_file_is_as_none(tmp_path, content):
    (tmp_path / "scale.json").write_bytes(content)
    with ScaleFile(tmp_path, DECLARED) as file:
        assert file.load() is None
        file.save(TWO, revision=1, changed_by="me")
        assert file.load().workers == TWO


def test_a_worker_twice_or_of_another_role_is_no_scale(tmp_path):
    prefill = KeptWorker(home=Role.PREFILL, index=0, role=Role.PREFILL)
    for workers in ((TWO[0], TWO[0]), (TWO[0], prefill)):
        with ScaleFile(tmp_path, DECLARED) as file:
            file.save(workers, revision=1, changed_by="me")
            assert file.load() is None


def test_graphs_without_a_name_do_not_take_each_others_scale(tmp_path):
    with ScaleFile(tmp_path, DECLARED, graph="/blue/graph.yaml") as file:
        file.save(TWO, revision=1, changed_by="me")
    with ScaleFile(tmp_path, DECLARED, graph="/green/graph.yaml") as file:
        assert file.load() is None
    with ScaleFile(tmp_path, DECLARED, graph="/blue/graph.yaml") as file:
        assert file.load().workers == TWO


@pytest.mark.parametrize(("name", "file"), [({}, "/blue/graph.yaml"), ({"name": "default"}, "")])
def test_only_a_graph_without_a_name_is_told_by_its_file(name, file):
    graph = Graph.model_validate({"model": "demo", **name})
    assert unnamed_file(graph, DeploymentOrigin(file="/blue/graph.yaml")) == file
    assert unnamed_file(graph, None) == ""


def test_only_one_of_two_deployments_of_a_name_remembers(tmp_path):
    with ScaleFile(tmp_path, DECLARED) as first, ScaleFile(tmp_path, DECLARED) as second:
        assert (first.is_ours, second.is_ours) == (True, False)
        second.save(TWO, revision=1, changed_by="second")
        assert first.load() is None
        first.save(TWO[:1], revision=1, changed_by="first")
        assert second.load() is None
