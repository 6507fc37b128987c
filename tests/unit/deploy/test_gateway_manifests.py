"""The example of `deploy/gateway`: its objects are valid, and its command is one that this version takes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.arguments.parser import Parser
from penstock.cli.router import add
from penstock.frontend.endpoint_picker.pool import POOLS
from tests.support.rendered import validate

FILE = Path(__file__).parents[3] / "deploy" / "gateway" / "picker.yaml"
OBJECTS = list(yaml.safe_load_all(FILE.read_text()))
BUILT_IN = [
    body for body in OBJECTS if "inference" not in body["apiVersion"] and "gateway" not in body["apiVersion"]
]


def named(kind: str) -> Any:
    (body,) = [body for body in OBJECTS if body["kind"] == kind]
    return body


@pytest.mark.parametrize("body", BUILT_IN, ids=lambda body: str(body["kind"]))
def test_built_in_objects_are_valid(body: Any) -> None:
    validate(body, "1.31")


def test_pool_route_service_and_pods_name_each_other() -> None:
    pool, route, service, picker = (
        named(kind) for kind in ("InferencePool", "HTTPRoute", "Service", "Deployment")
    )
    assert pool["apiVersion"] == POOLS.api_version
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    reference = pool["spec"]["endpointPickerRef"]
    assert reference["name"] == service["metadata"]["name"]
    assert reference["port"]["number"] == service["spec"]["ports"][0]["port"]
    labels = picker["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (container,) = picker["spec"]["template"]["spec"]["containers"]
    assert container["ports"][0]["containerPort"] == reference["port"]["number"]
    (account,) = named("RoleBinding")["subjects"]
    assert picker["spec"]["template"]["spec"]["serviceAccountName"] == account["name"]


def test_the_command_is_one_of_penstock() -> None:
    (container,) = named("Deployment")["spec"]["template"]["spec"]["containers"]
    program, *words = container["command"]
    assert program == "penstock"
    parser = Parser(prog="penstock")
    add(parser.add_subparsers())
    options = parser.parse_args(words)
    assert getattr(options, "pool") == named("InferencePool")["metadata"]["name"]  # noqa: B009 - names of flags
    assert getattr(options, "endpoint_picker.port") == "9002"
