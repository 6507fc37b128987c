"""All objects of a graph, in the order in which they are applied."""

from typing import Any

from penstock.deploy.manifests.kubernetes.access import access
from penstock.deploy.manifests.kubernetes.deployed import (
    FRONTEND,
    Deployed,
    check_names,
    check_places,
    check_replicas,
)
from penstock.deploy.manifests.kubernetes.gateway import check_gateway, gateway
from penstock.deploy.manifests.kubernetes.leader_worker_set import KIND
from penstock.deploy.manifests.kubernetes.network import network_policies, services
from penstock.deploy.manifests.kubernetes.planner import planner_objects
from penstock.deploy.manifests.kubernetes.pod_patch import patch_pods
from penstock.deploy.manifests.kubernetes.volumes import cache_claim
from penstock.deploy.manifests.kubernetes.workloads import budgets, check_one_node, workloads
from penstock.deploy.manifests.options import RenderOptions
from penstock.deploy.manifests.pod_graph import make_pod_graph
from penstock.graph import Graph

WORKLOADS = ("Deployment", "StatefulSet", KIND)
"""Kinds of objects that have pods."""


def kubernetes_objects(graph: Graph, options: RenderOptions) -> list[dict[str, Any]]:
    """Give the objects that run a graph, as the API of Kubernetes takes them; equal for equal arguments.

    The Secret is not among them: pods refer to it, and its owner makes it. Where the graph has no registry, its workers are Leases.

    Raises:
        ConfigError: the graph has what no pod could have; one line for each.
    """
    check_names(graph)
    check_replicas(graph)
    check_places(graph)
    if options.gateway is not None:
        check_gateway(graph)
    runtime = {"discovery": "kubernetes"} if graph.runtime.discovery == "local" else {}
    deployed = Deployed(graph=graph, pods=make_pod_graph(graph, options, runtime), options=options)
    check_one_node(deployed)
    claim = cache_claim(deployed)
    objects = [
        *access(deployed),
        deployed.object(
            "v1", "ConfigMap", deployed.config_name, immutable=True, data=dict(deployed.pods.files)
        ),
        *([claim] if claim is not None else []),
        *(
            network_policies(deployed) if options.network_policy else ()
        ),  # before the pods, which would run open
        *budgets(deployed),
        *services(deployed),
        *workloads(deployed),
        *planner_objects(deployed),
        *(gateway(deployed, options.gateway) if options.gateway is not None else ()),
        *([_service_monitor(deployed)] if options.service_monitor else []),
    ]
    for each in objects:
        if each["kind"] in WORKLOADS:
            part = each["metadata"]["labels"]["app.kubernetes.io/component"]
            patch_pods(deployed, part, pod_templates(each))
    return objects


def pod_templates(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Give the templates of a workload's pods: of a LeaderWorkerSet that of leaders and that of followers."""
    if workload["kind"] == KIND:
        group = workload["spec"]["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]
    return [workload["spec"]["template"]]


def _service_monitor(deployed: Deployed) -> dict[str, Any]:
    """Let Prometheus ask each frontend, whose metrics say what it sees of all workers, too."""
    endpoint: dict[str, Any] = {"port": "http", "path": "/metrics", "interval": "15s"}
    if deployed.graph.frontend.tls is not None:
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    return deployed.object(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        deployed.part_name(FRONTEND),
        FRONTEND,
        spec={"selector": {"matchLabels": deployed.selector(FRONTEND)}, "endpoints": [endpoint]},
    )
