"""A graph in Python, where numbers are computed: penstock serve --graph examples/graph.py."""

import os

from penstock.graph import FrontendSpec, Graph, Roles, RoleSpec

CORES = os.cpu_count() or 1

graph = Graph(
    model="demo",
    frontend=FrontendSpec(processes=2 if CORES > 4 else 1),
    roles=Roles(aggregated=RoleSpec(replicas=max(CORES - 1, 1))),
)
