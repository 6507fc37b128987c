"""The text of each target."""

from penstock.core.config import nearest
from penstock.core.errors import ConfigError
from penstock.deploy.manifests.compose import compose_file
from penstock.deploy.manifests.kubernetes import kubernetes_objects
from penstock.deploy.manifests.options import RenderOptions
from penstock.deploy.manifests.slurm import slurm_script
from penstock.deploy.manifests.yaml_text import dump_all
from penstock.graph import Graph


def manifest(target: str, graph: Graph, options: RenderOptions) -> str:
    """Write what runs a graph there: kubernetes, compose or slurm.

    Raises:
        ConfigError: there is no such target, or the graph has what nothing there could have.
    """
    match target:
        case "kubernetes":
            return dump_all(kubernetes_objects(graph, options))
        case "compose":
            return compose_file(graph, options)
        case "slurm":
            return slurm_script(graph, options)
    raise ConfigError(
        f"--target: there is no {target!r}{nearest(target, ['kubernetes', 'compose', 'slurm'])}"
    )
