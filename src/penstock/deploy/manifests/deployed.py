"""What all objects of one deployment share: names, labels, and what the graph says of its parts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.deploy.manifests.options import RenderOptions
from penstock.deploy.manifests.pod_graph import PodGraph, is_on_disk_of_pod, pods_of
from penstock.deploy.supervisor.resources import devices_of
from penstock.graph import Graph, RoleSpec

FRONTEND = "frontend"
WORKER_LABEL = "penstock.dev/worker"
"""On the pods of every role."""
HARDWARE_LABEL = "penstock.dev/hardware"
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_CHARACTERS_MAX = 63
_OF_GROUP = len("-999") + len("-") + 10
"""Of the longest label that LeaderWorkerSet gives followers, behind its own name: the index of the group, and the hash of the revision."""
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """A graph with where it runs.

    Attributes:
        graph: as its owner wrote it.
        pods: as pods read it.
    """

    graph: Graph
    pods: PodGraph
    options: RenderOptions

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def config_name(self) -> str:
        """Name of the ConfigMap: another for other content, so that a pod that restarts keeps what it started with."""
        return f"{self.name}-graph-{self.pods.digest}"

    @property
    def secret_name(self) -> str:
        return self.options.secret or f"{self.name}-secret"

    @property
    def roles(self) -> Mapping[Role, RoleSpec]:
        return self.graph.roles.present()

    @property
    def asks_api(self) -> bool:
        """Whether pods ask the API of Kubernetes who is there."""
        return self.pods.graph.runtime.discovery == "kubernetes"

    def part_name(self, part: str) -> str:
        return f"{self.name}-{part}"

    def selector(self, part: str | None = None) -> dict[str, str]:
        """Give labels that select the pods of one part, or of all; they never change."""
        labels = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": self.name}
        return labels if part is None else labels | {"app.kubernetes.io/component": part}

    def metadata(self, name: str, part: str | None = None) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": name}
        if self.options.namespace is not None:
            metadata["namespace"] = self.options.namespace
        metadata["labels"] = self.selector(part) | {"app.kubernetes.io/part-of": "penstock"}
        return metadata

    def object(
        self, api: str, kind: str, name: str, part: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Make an object; its status is none of ours."""
        return {"apiVersion": api, "kind": kind, "metadata": self.metadata(name, part), **fields}

    def has_own_disk(self, role: RoleSpec) -> bool:
        return is_on_disk_of_pod(role, self.options)

    def gpus(self, role: RoleSpec) -> int:
        """Give the GPUs of one worker; 0 on CPUs."""
        return devices_of(role)


def check_names(graph: Graph) -> None:
    """Check that objects may be named after the graph.

    Raises:
        ConfigError: they may not.
    """
    if not _NAME.fullmatch(graph.name):
        raise ConfigError(
            f"name: {graph.name}: objects of Kubernetes are named after it, so it must be up to 40 small letters, digits and '-',"
            " the first a letter; set another by --set name=chat"
        )
    if graph.name == "default":
        raise ConfigError(
            "name: default: pods' ServiceAccount has this name, and that of the namespace's other pods is called so;"
            " set another by --set name=chat"
        )
    for name, role in graph.roles.present().items():
        most = _LABEL_CHARACTERS_MAX - _OF_GROUP - len(f"-{name}")
        if role.nodes > 1 and len(graph.name) > most:
            raise ConfigError(
                f"name: {graph.name}: has {len(graph.name)} characters, and with roles.{name}.nodes: {role.nodes} a name has at most {most},"
                f" as LeaderWorkerSet labels pods with it, role, group and revision in {_LABEL_CHARACTERS_MAX} characters;"
                " set another by --set name=chat"
            )


def check_places(graph: Graph) -> None:
    """Check that nodes may have labels with the graph's places.

    Raises:
        ConfigError: one may not.
    """
    for name, role in graph.roles.present().items():
        place = role.location_of(0)
        for level in ("host", "zone", "region"):
            value = getattr(place, level)
            if value and not _LABEL_VALUE.fullmatch(value):
                raise ConfigError(
                    f"roles.{name}.locations.0.{level}: {value!r}: nodes are chosen by it, and no label of a node may have this value;"
                    " name one of up to 63 letters, digits, '-', '_' and '.', or leave it out"
                )


def check_replicas(graph: Graph) -> None:
    """Check that a role has at least one pod, or may get one.

    Raises:
        ConfigError: the graph has no worker at all.
    """
    if not any(pods_of(role) for role in graph.roles.present().values()):
        raise ConfigError("roles: have no worker at all; give one of them replicas: 1")
