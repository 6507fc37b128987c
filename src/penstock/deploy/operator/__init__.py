"""The operator: PenstockGraphs of a namespace become running deployments, and say how they are."""
