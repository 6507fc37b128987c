"""The engine arguments that must be equal on all nodes of a worker."""

from typing import Any

import msgspec

from penstock.core.types.instances import Role
from penstock.deploy.processes.engine_spec import engine_spec
from penstock.engine.launch import SymbolicHost
from penstock.engine.paged.checkpoint import Checkpoint
from penstock.engine.registry import describe_launch
from penstock.graph import Graph

_OF_ONE_NODE = {"model", "model_path"}
"""Nodes may have the model's files at different paths."""


def common_arguments(graph: Graph, role: Role, checkpoint: Checkpoint) -> dict[str, Any]:
    """Give the arguments by name, as plain JSON values.

    Raises:
        ConfigError: the engine cannot have a setting.
    """
    spec = graph.roles.present()[role]
    launch = describe_launch(spec.engine, engine_spec(graph, spec, checkpoint), SymbolicHost())
    shared = {name: value for name, value in launch.arguments.items() if name not in _OF_ONE_NODE}
    return msgspec.json.decode(msgspec.json.encode(shared), type=dict[str, Any])
