"""A Helm chart: the objects of Kubernetes as templates, whose values are the graph, images and numbers of pods.

Templates hold no logic: they take values, and the schema of the values refuses changes that need other objects.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from penstock import __version__
from penstock.core.types.instances import Role
from penstock.deploy.manifests.kubernetes import kubernetes_objects
from penstock.deploy.manifests.kubernetes.deployed import HARDWARE_LABEL
from penstock.deploy.manifests.kubernetes.gateway import PICKER
from penstock.deploy.manifests.kubernetes.objects import WORKLOADS, pod_templates
from penstock.deploy.manifests.options import RenderOptions
from penstock.deploy.manifests.pod_graph import GRAPH_FILE, pods_max
from penstock.deploy.manifests.yaml_text import dump
from penstock.graph import Graph, RoleSpec

_FREE = {"served_name", "context_length", "chat_template", "block_size", "router", "slo", "request_plane"}
"""Fields of a graph that change no object."""
_OF_PICKER = {"served_name", "block_size"}
"""Of these, what the endpoint picker of a gateway is started with."""
_FREE_OF_ROLES = {
    "weight_dtype", "expert_dtype", "kv_dtype", "max_batch_tokens", "max_running_requests", "max_waiting_requests",
    "prompt_order", "prompt_ageing", "kv_blocks", "sessions", "mock", "usd_per_hour", "watts",
}  # fmt: skip
_CHECKSUM, _FILES_CHECKSUM = "penstock.dev/graph-checksum", "penstock.dev/files-checksum"
_PLACE = re.compile(r"(?m)(?<=: )'?@@([^@\n]+)@@'?$")
_AGAIN = "objects depend on it: render the chart again with it"


def helm_chart(graph: Graph, options: RenderOptions) -> dict[str, str]:
    """Give the files of a chart, by path.

    Raises:
        ConfigError: the graph has what no pod could have.
    """
    objects = kubernetes_objects(graph, options)
    (config,) = (each for each in objects if each["kind"] == "ConfigMap")
    config_name = config["metadata"]["name"]
    document = yaml.safe_load(config["data"].pop(GRAPH_FILE))
    values: dict[str, Any] = {
        "image": options.image,
        "gpuImage": options.gpu_image,
        "secret": options.secret or f"{graph.name}-secret",
        "replicas": {},
        "graph": document,
    }
    files = hashlib.sha256(json.dumps(config["data"], sort_keys=True).encode()).hexdigest()  # the profiles
    templates = {
        f"templates/{number:02}-{_file_name(each)}.yaml": _template(each, config_name, files, values)
        for number, each in enumerate(objects)
    }
    chart = {
        "apiVersion": "v2",
        "name": graph.name,
        "description": f"Penstock serving {graph.model}".replace("\n", " "),
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
        "kubeVersion": ">=1.29.0-0",
    }
    return {
        "Chart.yaml": dump(chart),
        "values.yaml": dump(values),
        "values.schema.json": json.dumps(_schema(graph, options, values), indent=1) + "\n",
        **templates,
    }


def _template(made: dict[str, Any], config_name: str, files: str, values: dict[str, Any]) -> str:
    """Write an object with places for values; pods start again with another graph, or another checksum of `files`."""
    plain_name = config_name.rpartition("-")[0]
    if made["kind"] == "ConfigMap":
        made["metadata"]["name"] = plain_name
        made["immutable"] = False  # the checksum in the pods' template replaces them
        made["data"] = {GRAPH_FILE: "@@graph | toYaml | nindent 4@@"} | made["data"]
    elif made["kind"] in WORKLOADS:
        part = made["metadata"]["labels"]["app.kubernetes.io/component"]
        values["replicas"][part] = made["spec"]["replicas"]
        made["spec"]["replicas"] = f"@@replicas.{part}@@"
        for template in pod_templates(made):
            _place_in_pod(template, config_name, files, values["secret"])
    text = re.sub(r"\{\{", '{{ "{{" }}', dump(made))
    return _PLACE.sub(_action, text)


def _place_in_pod(template: dict[str, Any], config_name: str, files: str, secret: str) -> None:
    """Put places for values into a pod's template."""
    template["metadata"]["annotations"] = template["metadata"].get("annotations", {}) | {
        _CHECKSUM: "@@graph | toYaml | sha256sum | quote@@",
        _FILES_CHECKSUM: files,
    }
    container = template["spec"]["containers"][0]
    is_gpu = HARDWARE_LABEL in template["metadata"]["labels"]
    container["image"] = "@@gpuImage | quote@@" if is_gpu else "@@image | quote@@"
    for variable in container["env"]:
        if _at(variable, "valueFrom", "secretKeyRef", "name") == secret:
            variable["valueFrom"]["secretKeyRef"]["name"] = "@@secret | quote@@"
    for volume in template["spec"]["volumes"]:
        if _at(volume, "configMap", "name") == config_name:
            volume["configMap"]["name"] = config_name.rpartition("-")[0]


def _at(value: Any, *path: str) -> Any:
    """Give what is at a path; None where nothing is. What a graph adds to pods may have any shape."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _action(found: re.Match[str]) -> str:
    """Give the action of a template; text of several lines is a block whose action begins the next lines."""
    return f"{'|' if 'nindent' in found[1] else ''}{{{{ .Values.{found[1]} }}}}"


def _schema(graph: Graph, options: RenderOptions, values: dict[str, Any]) -> dict[str, Any]:
    """Describe the values: what objects depend on stays as it was rendered."""
    document = values["graph"]
    roles = {
        name: _fixed(RoleSpec, document["roles"][name], _FREE_OF_ROLES)
        for name in map(Role, document["roles"])
        if name in graph.roles.present()
    }
    free = _FREE if options.gateway is None else _FREE - _OF_PICKER
    of_graph = _fixed(Graph, document, free | {"roles"})
    of_graph["properties"]["roles"] = {
        "type": "object",
        "properties": roles,
        "additionalProperties": False,
        "required": list(roles),
    }
    most = {PICKER: 1} | {name.value: pods_max(role) for name, role in graph.roles.present().items()}
    counts = {
        part: {"type": "integer", "minimum": 0, "maximum": most.get(part) or graph.router.workers_max}
        for part in values["replicas"]
    }
    name = {"type": "string", "minLength": 1, "pattern": r"^\S+$"}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "image": name,
            "gpuImage": name,
            "secret": name,
            "replicas": {
                "type": "object",
                "properties": counts,
                "additionalProperties": False,
                "required": list(counts),
            },
            "graph": of_graph,
            "global": {"type": "object"},
        },
        "required": ["image", "gpuImage", "secret", "replicas", "graph"],
        "additionalProperties": False,
    }


def _fixed(config: type[Graph] | type[RoleSpec], document: dict[str, Any], free: set[str]) -> dict[str, Any]:
    """Describe a section: fields that are `free` may have any value, others the one that they have, or none."""
    properties = dict(_properties(config, document, free))
    required = [field for field in document if field not in free]
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "required": required,
    }


def _properties(
    config: type[Graph] | type[RoleSpec], document: dict[str, Any], free: set[str]
) -> Iterator[tuple[str, Any]]:
    for field in config.model_fields:
        if field in free:
            yield field, {}
        elif field in document:
            yield field, {"const": document[field], "description": _AGAIN}
        else:
            yield field, False


def _file_name(made: dict[str, Any]) -> str:
    part = made["metadata"]["labels"].get("app.kubernetes.io/component", "")
    return "-".join(filter(None, (made["kind"].lower(), part)))
