"""`penstock render`."""

import argparse
from pathlib import Path
from typing import Literal

from penstock.cli.parser import Parser, add_set
from penstock.core.errors import ConfigError
from penstock.deploy.manifests.kubernetes import kubernetes_objects
from penstock.deploy.manifests.options import Cache, Mount, RenderOptions, flag_of
from penstock.deploy.manifests.pod_graph import RELATIVE, dump_all, is_local_model
from penstock.deploy.manifests.slurm import slurm_script
from penstock.graph import Graph, Overrides, load

_OF_SLURM = {"nodes", "gpus_per_node"}
_READ = {"kubernetes": set(RenderOptions.model_fields) - _OF_SLURM, "slurm": _OF_SLURM}
"""Target: fields of the options that it reads."""


def _refuse_operators(graph: Graph) -> None:
    """Refuse a planner that scales by the operator's objects, which are none of a manifest.

    Raises:
        ConfigError: there is one.
    """
    if graph.planner is not None and graph.planner.scales == "pods":
        raise ConfigError(
            "planner.scales: pods: sets numbers of PenstockRoles, which the operator makes of a PenstockGraph, and no manifest has; apply"
            " the graph as a PenstockGraph, or leave planner out and scale by an autoscaler or kubectl scale"
        )


def _refuse_pods(graph: Graph) -> None:
    """Refuse fields of pods where there are none.

    Raises:
        ConfigError: the graph has some; one line for each place.
    """
    places = {"kubernetes": graph.kubernetes, "frontend.kubernetes": graph.frontend.kubernetes} | {
        f"roles.{name}.kubernetes": role.kubernetes for name, role in graph.roles.present().items()
    }
    if problems := [
        f"{place}: (a mapping): --target slurm makes no pods; leave it out, as by --set {place}=null, or use --target kubernetes"
        for place, spec in places.items()
        if spec is not None
    ]:
        raise ConfigError("\n".join(problems))


def _refuse_unread(target: str, options: RenderOptions) -> None:
    """Refuse options that the target does not read, in one line each.

    Raises:
        ConfigError: there are some.
    """
    unread = [
        f"{flag_of(name)}: --target {target} does not read it; leave it out, or use --target"
        f" {next(other for other, read in _READ.items() if name in read)}"
        for name, field in RenderOptions.model_fields.items()
        if name not in _READ[target] and getattr(options, name) != field.default
    ]
    if unread:
        raise ConfigError("\n".join(unread))


def manifest(target: Literal["kubernetes", "slurm"], graph: Graph, options: RenderOptions) -> str:
    """Write the YAML of Kubernetes or the batch script of Slurm that runs a graph.

    Raises:
        ConfigError: the target does not read an option, or the graph has a field that no pod or node could have.
    """
    _refuse_operators(graph)
    _refuse_unread(target, options)
    if target == "kubernetes":
        return dump_all(kubernetes_objects(graph, options))
    _refuse_pods(graph)
    return slurm_script(graph, options)


TARGETS = ("kubernetes", "slurm")


def add_render(parser: Parser) -> None:
    """Add the arguments of `penstock render`."""
    parser.description = (
        "Print what runs a graph elsewhere. Nothing is started or asked. What no pod could have is refused: one line"
        " for each field, with what to do."
    )
    parser.epilog = "Exit code: 2 if the graph has a mistake, or something that is of one machine."
    parser.add_argument("file", metavar="FILE", help="YAML, or Python that sets `graph`")
    parser.add_argument("--target", choices=TARGETS, default="kubernetes", help="default: kubernetes")
    parser.add_argument("--image", help="of frontends and workers without GPUs (default: penstock:VERSION)")
    parser.add_argument(
        "--gpu-image", metavar="IMAGE", help="of workers with GPUs (default: penstock-cuda:VERSION)"
    )
    parser.add_argument("--namespace", metavar="NAME", help="of every object (default: kubectl's)")
    parser.add_argument(
        "--secret",
        metavar="NAME",
        help="Secret with the key `secret`, and optionally admin-token, api-key, hf-token, registry-credentials and event-credentials (default: GRAPH-secret)",
    )
    parser.add_argument(
        "--mount",
        metavar="PATH=KIND:NAME",
        action="append",
        default=[],
        help="a directory of every pod that the graph names; KIND is secret, configmap, claim or host; may be repeated",
    )
    parser.add_argument(
        "--cache",
        metavar="WHERE",
        default="pod",
        help="weights of a hub model: pod (each downloads them), size:200Gi, claim:NAME or host:/DIRECTORY (default: pod)",
    )
    parser.add_argument(
        "--service-monitor", action="store_true", help="with a ServiceMonitor for Prometheus's operator"
    )
    parser.add_argument(
        "--gateway",
        metavar="NAME",
        help="with an InferencePool of the frontends, an HTTPRoute of this Gateway, and an endpoint picker",
    )
    parser.add_argument("--no-network-policy", action="store_true", help="without NetworkPolicies")
    parser.add_argument(
        "--egress-port",
        metavar="P",
        type=int,
        action="append",
        default=[],
        help="another port that pods may connect to, such as the API server's where it is neither 443 nor 6443; may be repeated",
    )
    parser.add_argument(
        "--nodes", type=int, help="of Slurm (default: the fewest that have the GPUs of all workers)"
    )
    parser.add_argument(
        "--gpus-per-node",
        metavar="N",
        type=int,
        help="of Slurm (default: as machines with the graph's hardware)",
    )
    add_set(parser, "set a field, as for serve")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:

    graph = load(options.file, Overrides(options.set))
    if Path(graph.model).is_dir() and not is_local_model(graph.model):
        raise ConfigError(f"model: {graph.model}: {RELATIVE}")
    given = {name: getattr(options, name) for name in _OPTIONS}
    settings = RenderOptions.of_flags(
        {name: value for name, value in given.items() if value is not None}
        | {
            "mounts": [Mount.read(text) for text in options.mount],
            "cache": Cache.read(options.cache),
            "egress_ports": options.egress_port,
            "network_policy": not options.no_network_policy,
        }
    )
    print(manifest(options.target, graph, settings), end="")  # noqa: T201
    return 0


_OPTIONS = (
    "image",
    "gpu_image",
    "namespace",
    "secret",
    "service_monitor",
    "gateway",
    "nodes",
    "gpus_per_node",
)
"""Flags with the names of fields."""
