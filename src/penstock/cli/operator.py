"""`penstock operator`."""

import argparse
import asyncio

from penstock.cli.parser import Parser, add_log_level
from penstock.core.errors import ConfigError
from penstock.core.log import configure
from penstock.deploy.manifests.options import DNS_LABEL
from penstock.deploy.manifests.pod_graph import dump_all
from penstock.deploy.operator.definitions import definitions
from penstock.deploy.operator.operator import run_operator
from penstock.runtime.kubernetes import KubernetesAccess


def add_operator(parser: Parser) -> None:
    """Add the arguments of `penstock operator`."""
    parser.description = (
        "Make the PenstockGraphs of a namespace of Kubernetes running deployments, and keep their status. Of several operators one acts:"
        " the one that holds the lock, the ConfigMap penstock-operator of that namespace."
    )
    parser.epilog = "Exit code: 2 if there is no cluster, or it cannot be used."
    parser.add_argument(
        "--crds", action="store_true", help="print the CustomResourceDefinitions as YAML, and end"
    )
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        help="whose PenstockGraphs it operates (default: that of the pod's service account or of the kubeconfig that KUBECONFIG names)",
    )
    parser.add_argument(
        "--listen",
        metavar="tcp://HOST:PORT",
        help="address of /healthz, /readyz and /metrics (default: none)",
    )
    parser.add_argument(
        "--lease-s",
        type=float,
        default=15.0,
        metavar="S",
        help="an operator that is silent for so long is replaced (default 15)",
    )
    add_log_level(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:

    if options.crds:
        print(dump_all(definitions()), end="")  # noqa: T201
        return 0
    if not 1 <= options.lease_s <= 3600:
        raise ConfigError(f"--lease-s: must be from 1 to 3600, got {options.lease_s:g}")
    configure(options.log_level, process="operator")
    access = KubernetesAccess.find()
    if options.namespace is not None:
        if not DNS_LABEL.fullmatch(options.namespace):
            raise ConfigError(
                f"--namespace: must be up to 63 small letters, digits and '-', got {options.namespace!r}"
            )
        access.namespace = options.namespace
    asyncio.run(run_operator(access, lease_s=options.lease_s, listen=options.listen))
    return 0
