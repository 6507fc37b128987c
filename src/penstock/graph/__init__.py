"""Floor 7: the deployment as data. `penstock serve`, the simulator and the planner read the same graph."""

from penstock.graph.graph import DEMO_MODEL, FrontendSpec, Graph, Slo, Supervision, build, load
from penstock.graph.overrides import Overrides
from penstock.graph.role import Roles, RoleSpec

__all__ = [
    "DEMO_MODEL",
    "FrontendSpec",
    "Graph",
    "Overrides",
    "RoleSpec",
    "Roles",
    "Slo",
    "Supervision",
    "build",
    "load",
]
