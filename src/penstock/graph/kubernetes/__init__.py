"""What a graph adds to its pods in Kubernetes: fields of pods and containers by their own names, and how they are merged."""

from penstock.graph.kubernetes.spec import KubernetesSpec

__all__ = ["KubernetesSpec"]
