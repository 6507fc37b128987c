"""A deployment behind an inference gateway: its frontends are an InferencePool, and `penstock router` picks one for each request."""

import json
from collections.abc import Iterator
from typing import Any

from penstock.core.errors import ConfigError
from penstock.deploy.manifests.kubernetes.access import account
from penstock.deploy.manifests.kubernetes.deployed import FRONTEND, Deployed
from penstock.deploy.manifests.kubernetes.network import picker_policy
from penstock.deploy.manifests.kubernetes.pods import container_security, model_environment, pod_template
from penstock.deploy.manifests.kubernetes.volumes import volume_mounts
from penstock.deploy.manifests.kubernetes.workloads import deployment
from penstock.deploy.manifests.pod_graph import PICKER_PORT, frontend_port
from penstock.graph import DEMO_MODEL, Graph

PICKER = "picker"
_POOLS = "inference.networking.k8s.io"
_GATEWAYS = "gateway.networking.k8s.io"
_RULES = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [_POOLS], "resources": ["inferencepools"], "verbs": ["get", "list", "watch"]},
]
_GRACE_S = 10.0
_PROBES_START_MAX = 60
"""Probes of 10 s until the picker has the model's small files."""


def gateway(deployed: Deployed, name: str) -> Iterator[dict[str, Any]]:
    """Give the pool of frontends, the route to it from the Gateway `name`, and the picker.

    Any frontend can answer any request, so the gateway chooses one itself where the picker is away.
    """
    reference = {
        "name": deployed.part_name(PICKER),
        "port": {"number": PICKER_PORT},
        "failureMode": "FailOpen",
    }
    yield deployed.object(
        f"{_POOLS}/v1",
        "InferencePool",
        deployed.name,
        spec={
            "selector": {"matchLabels": deployed.selector(FRONTEND)},
            "targetPorts": [{"number": frontend_port(deployed.graph)}],
            "endpointPickerRef": reference,
        },
    )
    backend = {"group": _POOLS, "kind": "InferencePool", "name": deployed.name}
    yield deployed.object(
        f"{_GATEWAYS}/v1",
        "HTTPRoute",
        deployed.name,
        spec={"parentRefs": [{"name": name}], "rules": [{"backendRefs": [backend]}]},
    )
    yield deployed.object(
        "v1",
        "Service",
        deployed.part_name(PICKER),
        PICKER,
        spec={
            "type": "ClusterIP",
            "selector": deployed.selector(PICKER),
            "ports": [{"name": "grpc", "port": PICKER_PORT, "targetPort": "grpc", "appProtocol": "http2"}],
        },
    )
    yield from account(deployed, deployed.part_name(PICKER), _RULES)
    if deployed.options.network_policy:
        yield picker_policy(deployed, PICKER)
    yield deployment(deployed, PICKER, 1, _pod(deployed), has_spare=True)


def check_gateway(graph: Graph) -> None:
    """Check that a picker could serve the graph.

    Raises:
        ConfigError: it could not; one line for each reason.
    """
    problems = []
    if graph.model == DEMO_MODEL:
        problems.append(
            "gateway: the picker reads the tokenizer of a hub model or directory, and demo is neither; name one"
        )
    if graph.served_name is not None and graph.served_name != graph.model:
        problems.append(
            f"served_name: {graph.served_name}: the picker knows the model as {graph.model}; leave it out, or --gateway"
        )
    if graph.frontend.tls is not None:
        problems.append(
            "frontend.tls: gateways speak plain HTTP to pods of a pool; leave it out, or --gateway"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _pod(deployed: Deployed) -> dict[str, Any]:
    graph = deployed.graph
    adapters = sorted({name for role in deployed.roles.values() for name in role.adapters})
    port = str(PICKER_PORT)
    arguments = ["router", graph.model, "--pool", deployed.name, "--endpoint-picker-port", port]
    arguments += ["--set", "endpoint_picker.host=0.0.0.0", "--block-size", str(graph.block_size)]
    if adapters:
        arguments += ["--set", f"adapters={json.dumps(adapters)}"]
    probe = {"grpc": {"port": PICKER_PORT, "service": "liveness"}}
    container = {
        "name": PICKER,
        "image": deployed.options.image,
        "args": arguments,
        "env": model_environment(deployed),
        "ports": [{"name": "grpc", "containerPort": PICKER_PORT}],
        "startupProbe": probe | {"failureThreshold": _PROBES_START_MAX},
        "readinessProbe": {"grpc": {"port": PICKER_PORT, "service": "readiness"}},
        "livenessProbe": probe,
        "resources": {"requests": {"cpu": "1", "memory": "512Mi"}},
        "securityContext": container_security(),
        "volumeMounts": volume_mounts(deployed, FRONTEND),
    }
    template = pod_template(deployed, PICKER, None, container, _GRACE_S)
    template["spec"] |= {
        "serviceAccountName": deployed.part_name(PICKER),
        "automountServiceAccountToken": True,
    }
    return template
