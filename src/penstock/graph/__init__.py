"""Floor 6: the deployment as data. One graph describes it; the local deployment and later roots read it."""

from penstock.graph.frontend import FrontendSpec
from penstock.graph.graph import DEMO_MODEL, Graph, load, override
from penstock.graph.link import Link
from penstock.graph.role import Roles, RoleSpec
from penstock.graph.slo import Slo
from penstock.graph.supervision import Supervision

__all__ = [
    "DEMO_MODEL",
    "FrontendSpec",
    "Graph",
    "Link",
    "RoleSpec",
    "Roles",
    "Slo",
    "Supervision",
    "load",
    "override",
]
