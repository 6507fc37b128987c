"""The text of each target, and the files of a chart."""

from pathlib import Path

from penstock.core.config import nearest
from penstock.core.errors import ConfigError
from penstock.deploy.manifests.compose import compose_file
from penstock.deploy.manifests.helm import helm_chart
from penstock.deploy.manifests.kubernetes import kubernetes_objects
from penstock.deploy.manifests.options import RenderOptions, flag_of
from penstock.deploy.manifests.slurm import slurm_script
from penstock.deploy.manifests.yaml_text import dump_all
from penstock.graph import Graph

_OF_SLURM = {"nodes", "gpus_per_node"}
_OPTIONS = {
    "kubernetes": set(RenderOptions.model_fields) - _OF_SLURM,
    "helm": set(RenderOptions.model_fields) - _OF_SLURM,
    "compose": {"image", "gpu_image", "mounts", "cache"},
    "slurm": _OF_SLURM,
}
"""Target: fields of the options that it reads."""


def write_chart(graph: Graph, options: RenderOptions, directory: Path) -> int:
    """Write a Helm chart of a graph; a chart that is there is replaced.

    Returns:
        its number of files.

    Raises:
        ConfigError: the graph has what no pod could have, an option is not a chart's, or the directory has something else or cannot
            be written.
    """
    _refuse_operators(graph)
    _refuse_unread("helm", options)
    files = helm_chart(graph, options)
    try:
        if directory.exists() and any(directory.iterdir()) and not (directory / "Chart.yaml").is_file():
            raise ConfigError(
                f"--output: {directory}: has files and no Chart.yaml; name a directory of its own"
            )
        for old in (directory / "templates").glob("*.yaml"):
            old.unlink()
        (directory / "templates").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {directory}: {(error.strerror or str(error)).lower()}") from error
    return len(files)


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


def _refuse_pods(target: str, graph: Graph) -> None:
    """Refuse fields of pods where there are none.

    Raises:
        ConfigError: the graph has some; one line for each place.
    """
    places = {"kubernetes": graph.kubernetes, "frontend.kubernetes": graph.frontend.kubernetes} | {
        f"roles.{name}.kubernetes": role.kubernetes for name, role in graph.roles.present().items()
    }
    if problems := [
        f"{place}: (a mapping): --target {target} makes no pods; leave it out, as by --set {place}=null, or use --target kubernetes or"
        " helm"
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
        f" {' or '.join(other for other, read in _OPTIONS.items() if name in read)}"
        for name, field in RenderOptions.model_fields.items()
        if name not in _OPTIONS.get(target, {name}) and getattr(options, name) != field.default
    ]
    if unread:
        raise ConfigError("\n".join(unread))


def manifest(target: str, graph: Graph, options: RenderOptions) -> str:
    """Write what runs a graph there: kubernetes, compose or slurm.

    Raises:
        ConfigError: there is no such target, it does not read an option, or the graph has what nothing there could have.
    """
    _refuse_operators(graph)
    _refuse_unread(target, options)
    match target:
        case "kubernetes":
            return dump_all(kubernetes_objects(graph, options))
        case "compose":
            _refuse_pods(target, graph)
            return compose_file(graph, options)
        case "slurm":
            _refuse_pods(target, graph)
            return slurm_script(graph, options)
    raise ConfigError(
        f"--target: there is no {target!r}{nearest(target, ['kubernetes', 'compose', 'slurm'])}"
    )
