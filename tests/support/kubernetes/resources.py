"""The kinds of objects that the API server keeps: those built in, and those of CustomResourceDefinitions."""

from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of objects.

    Attributes:
        group: empty is the core group.
        has_status: whether it has the subresource `status`; its main resource then ignores changes of it.
        scale: paths of `specReplicasPath`, `statusReplicasPath` and `labelSelectorPath`; None without that subresource.
        schema: openAPIV3Schema; None for built-in kinds, whose fields are not checked.
    """

    group: str
    version: str
    plural: str
    name: str
    is_namespaced: bool = True
    has_status: bool = False
    scale: tuple[str, str, str] | None = None
    schema: Object | None = field(default=None, compare=False)

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def key(self) -> tuple[str, str]:
        return self.group, self.plural


_REPLICAS = (".spec.replicas", ".status.replicas", ".status.selector")

BUILT_IN = (
    Kind("", "v1", "namespaces", "Namespace", is_namespaced=False),
    Kind("", "v1", "nodes", "Node", is_namespaced=False, has_status=True),
    Kind("", "v1", "pods", "Pod", has_status=True),
    Kind("", "v1", "services", "Service", has_status=True),
    Kind("", "v1", "configmaps", "ConfigMap"),
    Kind("", "v1", "secrets", "Secret"),
    Kind("", "v1", "serviceaccounts", "ServiceAccount"),
    Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", has_status=True),
    Kind("", "v1", "events", "Event"),
    Kind("apps", "v1", "deployments", "Deployment", has_status=True, scale=_REPLICAS),
    Kind("apps", "v1", "statefulsets", "StatefulSet", has_status=True, scale=_REPLICAS),
    Kind("apps", "v1", "replicasets", "ReplicaSet", has_status=True, scale=_REPLICAS),
    Kind("coordination.k8s.io", "v1", "leases", "Lease"),
    Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", has_status=True),
    Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Kind("networking.k8s.io", "v1", "ingresses", "Ingress", has_status=True),
    Kind("rbac.authorization.k8s.io", "v1", "roles", "Role"),
    Kind("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
    Kind("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler", has_status=True),
    Kind("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool", has_status=True),
    Kind("gateway.networking.k8s.io", "v1", "httproutes", "HTTPRoute", has_status=True),
    Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False, has_status=True),
)  # fmt: skip


class Kinds:
    """All kinds, by group and plural."""

    def __init__(self) -> None:
        self._kinds = {kind.key: kind for kind in BUILT_IN}

    def find(self, group: str, version: str, plural: str) -> Kind | None:
        kind = self._kinds.get((group, plural))
        return kind if kind is not None and kind.version == version else None

    def of(self, group: str, version: str) -> list[Kind]:
        return [kind for kind in self._kinds.values() if kind.group == group and kind.version == version]

    def add(self, definition: Object) -> None:
        """Serve the kind of a CustomResourceDefinition."""
        for kind in kinds_of(definition):
            self._kinds[kind.key] = kind

    def remove(self, definition: Object) -> None:
        for kind in kinds_of(definition):
            self._kinds.pop(kind.key, None)


def kinds_of(definition: Object) -> list[Kind]:
    """Give the kinds that a CustomResourceDefinition defines: one for each served version."""
    spec = definition["spec"]
    kinds = []
    for version in spec["versions"]:
        if not version.get("served"):
            continue
        subresources = version.get("subresources", {})
        scale = subresources.get("scale")
        kinds.append(
            Kind(
                group=spec["group"],
                version=version["name"],
                plural=spec["names"]["plural"],
                name=spec["names"]["kind"],
                is_namespaced=spec["scope"] == "Namespaced",
                has_status="status" in subresources,
                scale=None
                if scale is None
                else (
                    scale["specReplicasPath"],
                    scale["statusReplicasPath"],
                    scale.get("labelSelectorPath", ""),
                ),
                schema=version["schema"]["openAPIV3Schema"],
            )
        )
    return kinds
