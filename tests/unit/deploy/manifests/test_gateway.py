"""A graph behind an inference gateway, as it is rendered and as the example has it: a pool that its schema takes, a picker that the command takes."""

import json
from typing import Any

import pytest
import yaml

from penstock.cli import make_parser
from penstock.cli.router import RouterCommandConfig
from penstock.frontend.endpoint_picker.pool import POOLS
from penstock.graph import Overrides, build
from tests.support.kubernetes import schema
from tests.support.kubernetes.problems import Refused
from tests.support.rendered import ROOT, by_kind, objects_of, pods, validate

SCHEMA = json.loads(
    (ROOT / "tests" / "data" / "inference_pool.json").read_text(),
    object_hook=lambda part: {key: value for key, value in part.items() if key != "default"},
)
GRAPH = {
    "name": "chat",
    "model": "org/model",
    "block_size": 32,
    "frontend": {"port": 8080},
    "roles": {"aggregated": {"engine": "mock", "adapters": ["sql"]}},
}


def rendered(**options: Any) -> list[dict]:
    return objects_of(build(GRAPH), gateway="public", **options)


@pytest.fixture(params=["rendered", "example"])
def objects(request: pytest.FixtureRequest) -> list[dict]:
    example = ROOT / "deploy" / "gateway" / "picker.yaml"
    return rendered() if request.param == "rendered" else list(yaml.safe_load_all(example.read_text()))


def picker(objects: list[dict]) -> dict:
    (found,) = (template for name, template in pods(objects).items() if name.endswith("picker"))
    return found


def test_a_pool_of_the_frontends_is_one_that_the_released_schema_takes() -> None:
    made = rendered()
    (pool,) = by_kind(made, "InferencePool").values()
    schema.check(SCHEMA, pool)
    assert schema.prune(SCHEMA, pool) == pool, "no field that it does not know"
    labels = pods(made)["chat-frontend"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (port,) = pool["spec"]["targetPorts"]
    (container,) = pods(made)["chat-frontend"]["spec"]["containers"]
    assert {"name": "http", "containerPort": port["number"]} in container["ports"]
    pool["spec"]["targetPorts"] = []
    with pytest.raises(Refused):
        schema.check(SCHEMA, pool)


def test_route_pool_service_and_picker_name_each_other(objects: list[dict]) -> None:
    (pool,), (route,) = (by_kind(objects, kind).values() for kind in ("InferencePool", "HTTPRoute"))
    assert pool["apiVersion"] == POOLS.api_version
    ((backend,),) = (rule["backendRefs"] for rule in route["spec"]["rules"])
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    reference = pool["spec"]["endpointPickerRef"]
    service = by_kind(objects, "Service")[reference["name"]]["spec"]
    template = picker(objects)
    assert service["selector"].items() <= template["metadata"]["labels"].items()
    assert service["ports"][0]["port"] == reference["port"]["number"] == 9002
    (container,) = template["spec"]["containers"]
    assert reference["port"]["number"] in {port["containerPort"] for port in container["ports"]}
    account = template["spec"]["serviceAccountName"]
    subjects = [each["subjects"][0]["name"] for each in by_kind(objects, "RoleBinding").values()]
    assert account in subjects
    for each in objects:
        if each["kind"] not in {"InferencePool", "HTTPRoute"}:
            validate(each, "1.31")


def test_the_pickers_command_is_one_of_penstock(objects: list[dict]) -> None:
    (container,) = picker(objects)["spec"]["containers"]
    words = container.get("args") or container["command"][1:]
    options = vars(make_parser().parse_args(words))
    overrides = Overrides(options["set"])
    for place in ("endpoint_picker.port", "service.block_size"):
        if options[place] is not None:
            overrides.assign(place, options[place], flag=place)
    given = {"model": options["model"], "pool": options["pool"]}
    config = RouterCommandConfig.parse(overrides.apply(given), source="picker")
    (pool,) = by_kind(objects, "InferencePool").values()
    assert config.pool == pool["metadata"]["name"]
    assert config.endpoint_picker is not None
    assert config.endpoint_picker.port == 9002
    if "args" in container:
        assert (config.model, config.adapters, config.service.block_size) == ("org/model", ("sql",), 32)
        assert config.endpoint_picker.host == "0.0.0.0"


def test_the_picker_is_reached_by_gateways_and_reaches_no_pod() -> None:
    made = rendered(egress_ports=(16443,))
    spec = by_kind(made, "NetworkPolicy")["chat-picker"]["spec"]
    assert spec["ingress"] == [{"ports": [{"protocol": "TCP", "port": 9002}]}]
    ports = {port["port"] for rule in spec["egress"] for port in rule["ports"]}
    assert ports == {53, 443, 6443, 16443}
    assert by_kind(made, "Deployment")["chat-picker"]["spec"]["replicas"] == 1, "two would not see each other"
    assert "chat-picker" not in by_kind(rendered(network_policy=False), "NetworkPolicy")
    assert "chat-picker" not in pods(objects_of(build(GRAPH)))
