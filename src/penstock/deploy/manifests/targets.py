"""`penstock render`: the text that runs a graph on Kubernetes or Slurm."""

from typing import Literal

from penstock.core.errors import ConfigError
from penstock.deploy.manifests.kubernetes import kubernetes_objects
from penstock.deploy.manifests.options import RenderOptions, flag_of
from penstock.deploy.manifests.slurm import slurm_script
from penstock.deploy.manifests.yaml_text import dump_all
from penstock.graph import Graph

_OF_SLURM = {"nodes", "gpus_per_node"}
_OPTIONS = {"kubernetes": set(RenderOptions.model_fields) - _OF_SLURM, "slurm": _OF_SLURM}
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
        f" {next(other for other, read in _OPTIONS.items() if name in read)}"
        for name, field in RenderOptions.model_fields.items()
        if name not in _OPTIONS[target] and getattr(options, name) != field.default
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
