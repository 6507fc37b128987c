"""A graph behind an inference gateway: a pool that its schema takes, a picker that the command takes, and who may reach it."""

import json

import kubernetes_validate
import pytest

from penstock.cli.arguments.parser import Parser
from penstock.cli.router import add
from penstock.core.errors import ConfigError
from penstock.deploy.commands.router import RouterCommandConfig
from penstock.frontend.endpoint_picker.pool import POOLS
from penstock.graph import Overrides, build
from tests.support.kubernetes import schema
from tests.support.kubernetes.problems import Refused
from tests.support.rendered import ROOT, by_kind, objects_of, pods

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


def objects(**options):
    return objects_of(build(GRAPH), gateway="public", **options)


def test_a_pool_of_the_frontends_is_one_that_the_released_schema_takes() -> None:
    made = objects()
    (pool,) = by_kind(made, "InferencePool").values()
    assert pool["apiVersion"] == POOLS.api_version
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


def test_route_pool_service_and_picker_name_each_other() -> None:
    made = objects()
    (route,) = by_kind(made, "HTTPRoute").values()
    assert route["spec"]["parentRefs"] == [{"name": "public"}]
    ((backend,),) = (rule["backendRefs"] for rule in route["spec"]["rules"])
    assert (backend["kind"], backend["name"]) == ("InferencePool", "chat")
    reference = by_kind(made, "InferencePool")["chat"]["spec"]["endpointPickerRef"]
    service = by_kind(made, "Service")[reference["name"]]["spec"]
    template = pods(made)["chat-picker"]
    assert service["selector"].items() <= template["metadata"]["labels"].items()
    assert service["ports"][0]["port"] == reference["port"]["number"] == 9002
    account = template["spec"]["serviceAccountName"]
    assert by_kind(made, "RoleBinding")[account]["subjects"][0]["name"] == account
    assert by_kind(made, "Deployment")["chat-picker"]["spec"]["replicas"] == 1, "two would not see each other"
    for each in made:
        if each["kind"] not in {"InferencePool", "HTTPRoute"}:
            kubernetes_validate.validate(each, "1.37", strict=True)


def test_the_pickers_command_is_one_of_penstock() -> None:
    (container,) = pods(objects())["chat-picker"]["spec"]["containers"]
    parser = Parser(prog="penstock")
    add(parser.add_subparsers())
    options = parser.parse_args(container["args"])
    overrides = Overrides(options.set)
    given = {"model": options.model, "pool": options.pool}
    for place in ("endpoint_picker.port", "service.block_size"):
        overrides.assign(place, getattr(options, place), flag=place)
    config = RouterCommandConfig.parse(overrides.apply(given), source="picker")
    assert (config.model, config.pool, config.adapters) == ("org/model", "chat", ("sql",))
    assert config.service.block_size == 32
    assert config.endpoint_picker is not None
    assert (config.endpoint_picker.host, config.endpoint_picker.port) == ("0.0.0.0", 9002)


def test_the_picker_is_reached_by_gateways_and_reaches_no_pod() -> None:
    spec = by_kind(objects(egress_ports=(16443,)), "NetworkPolicy")["chat-picker"]["spec"]
    assert spec["ingress"] == [{"ports": [{"protocol": "TCP", "port": 9002}]}]
    ports = {port["port"] for rule in spec["egress"] for port in rule["ports"]}
    assert ports == {53, 443, 6443, 16443}
    assert "chat-picker" not in by_kind(objects(network_policy=False), "NetworkPolicy")
    assert "chat-picker" not in pods(objects_of(build(GRAPH)))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model": "demo", "roles": {"aggregated": {}}}, "gateway: the picker reads the tokenizer"),
        ({"served_name": "chat"}, "served_name: chat: the picker knows the model as org/model"),
        (
            {"frontend": {"tls": {"certificate": "/k/c", "key": "/k/k"}}},
            "frontend.tls: gateways speak plain HTTP",
        ),
    ],
)
def test_what_no_picker_could_serve_is_refused(changes: dict, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        objects_of(build(GRAPH | changes), gateway="public")
    assert caught.value.message.startswith(line)
