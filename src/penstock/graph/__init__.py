"""Floor 7: the deployment as data. `penstock serve`, the simulator and the planner read the same graph."""

from penstock.graph.frontend import FrontendSpec
from penstock.graph.graph import DEMO_MODEL, Graph, build, load
from penstock.graph.overrides import Overrides
from penstock.graph.role import Roles, RoleSpec
from penstock.graph.slo import Slo
from penstock.graph.supervision import Supervision

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
