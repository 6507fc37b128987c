"""The objects of Kubernetes that run a graph."""

from penstock.deploy.manifests.kubernetes.objects import kubernetes_objects

__all__ = ["kubernetes_objects"]
