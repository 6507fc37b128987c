"""The operator's kinds: their file is current, structural, and takes every graph that is a graph."""

import functools
from pathlib import Path

import pytest
import yaml

from penstock.deploy.manifests.pod_graph import dump_all
from penstock.deploy.operator.definitions import definitions, structural_schema
from penstock.graph import Graph
from tests.support.kubernetes import schema
from tests.support.kubernetes.problems import Refused

ROOT = Path(__file__).parents[4]
GRAPHS = sorted([*ROOT.glob("examples/*.yaml"), *ROOT.glob("examples/**/*.yaml")])
_ANNOTATION_BYTES_MAX = 262_144


def test_the_file_is_what_the_command_prints():
    text = (ROOT / "deploy" / "kubernetes" / "crd.yaml").read_text()
    assert text == dump_all(definitions()), "run python tools/config_reference.py"


@pytest.mark.parametrize("definition", definitions(), ids=lambda each: each["spec"]["names"]["kind"])
def test_schemas_are_structural(definition):
    schema.check_definition(definition)
    assert len(dump_all([definition])) < _ANNOTATION_BYTES_MAX, "kubectl apply keeps a copy in an annotation"


@functools.cache
def graph_schema():
    return definitions()[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def as_object(graph):
    graph = {key: value for key, value in graph.items() if key != "name"}
    return {"kind": "PenstockGraph", "metadata": {"name": "chat"}, "spec": {"graph": graph}}


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.name)
def test_every_example_fits_and_loses_nothing(path):
    document = yaml.safe_load(path.read_text())
    if not isinstance(document, dict) or "model" not in document:
        pytest.skip("no graph")
    body = as_object(document)
    schema.check(graph_schema(), body)
    assert schema.prune(graph_schema(), body) == body


SHORT_FORMS = (
    {"roles": {"decode": {"engine": {"name": "vllm", "args": {"gpu_memory_utilization": 0.9}}}}},
    {"roles": {"decode": {"kv": {"host": "8GiB", "disk": "/var/cache:10GiB", "object": "s3://a/b:1TiB"}}}},
    {"roles": {"decode": {"weight_dtype": "bf16", "adapters": ["a"], "locations": [{"zone": "a"}]}}},
    {"roles": {"aggregated": None}, "slo": None, "context_length": None},
    {"kubernetes": {"pod": {"nodeSelector": {"a": None}}, "annotations": {"a": None}}},
    {"roles": {"decode": {"kubernetes": {"container": {"resources": {"limits": {"rdma/ib": 1}}}}}}},
)


@pytest.mark.parametrize("graph", SHORT_FORMS)
def test_short_forms_fit(graph):
    body = as_object({"model": "demo", **graph})
    schema.check(graph_schema(), body)
    assert schema.prune(graph_schema(), body) == body


def test_every_field_of_the_model_is_there():
    properties = structural_schema(Graph)["properties"]
    assert properties.keys() == Graph.model_fields.keys()
    assert properties["roles"]["properties"]["decode"]["properties"].keys() >= {"replicas", "engine", "kv"}
    assert properties["block_size"]["maximum"] == 512


@pytest.mark.parametrize(
    "graph",
    [{"block_size": 513}, {"roles": {"decode": {"replicas": "two"}}}, {"roles": []}, {"frontend": "x"}],
)
def test_what_cannot_be_is_refused(graph):
    with pytest.raises(Refused, match="is invalid"):
        schema.check(graph_schema(), as_object({"model": "demo", **graph}))
