"""`penstock render`."""

import argparse
from pathlib import Path

from penstock.cli.parser import Parser, add_set
from penstock.core.errors import ConfigError
from penstock.deploy.manifests.options import Cache, Mount, RenderOptions
from penstock.deploy.manifests.paths import RELATIVE, is_local_model
from penstock.deploy.manifests.targets import manifest
from penstock.graph import Overrides, load

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
