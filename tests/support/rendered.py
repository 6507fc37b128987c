"""Example graphs as they can be rendered, and what is asked of rendered objects."""

from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
from kubernetes_validate import utils

from penstock.deploy.manifests.kubernetes import kubernetes_objects
from penstock.deploy.manifests.options import RenderOptions
from penstock.graph import Graph, Overrides, load

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(
    path
    for folder in ("examples", "examples/graphs", "examples/recipes")
    for path in (ROOT / folder).glob("*.yaml")
)
SHAPES = ("8b-", "70b-", "671b-", "gpt-oss-120b-h100-p4d4.")
"""Graphs for simulations, of models without weights."""
ELSEWHERE = {
    "two_hosts.yaml": ("runtime.hub=null",),  # the hub is an address of the first host
    "8b-h100-three-regions.yaml": ("roles.aggregated.locations=[]",),
}
"""What else of an example is of its machines, by file name."""


utils.schema_contents = cache(utils.schema_contents)
utils.all_versions = cache(utils.all_versions)
"""Else each object is validated by files that are read and parsed anew, of 2 MB together."""


def validate(body: Json, version: str) -> None:
    """Raise `kubernetes_validate.ValidationError` where an object is not one of this version of Kubernetes, or has unknown fields."""
    kubernetes_validate.validate(body, version, strict=True)


def example(path: Path, *assignments: str) -> Graph:
    """Load an example as pods could run it; simulated models become the one of the package."""
    changes = [*ELSEWHERE.get(path.name, ()), *assignments]
    if path.name.startswith(SHAPES):
        changes.append("model=demo")
    name = load(path).name
    return load(path, Overrides([*changes, f"name=g-{name}"[:40].replace(".", "-").strip("-")]))


def objects_of(graph: Graph, **options: object) -> list[Json]:
    return kubernetes_objects(graph, RenderOptions.model_validate(options))


def by_kind(objects: list[Json], kind: str) -> dict[str, Json]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def pods(objects: list[Json]) -> dict[str, Json]:
    """Give the pod templates by the name of their workload."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in objects
        if each["kind"] in {"Deployment", "StatefulSet"}
    }
