"""The recipes in examples/recipes, and the engine specs of their roles."""

from collections.abc import Iterator
from pathlib import Path

from penstock.core.types.instances import Role
from penstock.engine.spec import EngineSpec
from penstock.graph import Graph, RoleSpec, load

RECIPES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.yaml"))


def roles_of(path: Path) -> Iterator[tuple[Graph, Role, RoleSpec]]:
    """Yield the roles of a recipe with its graph."""
    graph = load(path)
    for name, role in graph.roles.present().items():
        yield graph, name, role


def spec_of(graph: Graph, name: Role, role: RoleSpec) -> EngineSpec:
    """Make a role's engine spec, without the checkpoint that a worker reads."""
    return EngineSpec(
        model=graph.model,
        block_size=graph.block_size,
        role=name,
        args=role.engine_args,
        context_length=graph.context_length,
        max_batch_tokens=role.max_batch_tokens,
        max_running_requests=role.max_running_requests,
        dtype=role.weight_dtype,
        kv_dtype=role.kv_dtype,
        device="cuda:0",
        tensor_parallel=role.tensor_parallel,
        pipeline_parallel=role.pipeline_parallel,
        data_parallel=role.data_parallel,
        expert_parallel=role.expert_parallel,
    )
