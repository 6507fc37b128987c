"""The recipes in examples/recipes, and their roles."""

from collections.abc import Iterator
from pathlib import Path

from penstock.core.types.instances import Role
from penstock.graph import Graph, RoleSpec, load

RECIPES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.yaml"))


def roles_of(path: Path) -> Iterator[tuple[Graph, Role, RoleSpec]]:
    """Yield the roles of a recipe with its graph."""
    graph = load(path)
    for name, role in graph.roles.present().items():
        yield graph, name, role
