"""The object that holds the number of a role's workers in Kubernetes, which the operator makes pods of."""

from penstock.runtime.kubernetes import Resource

GROUP, VERSION = "penstock.dev", "v1alpha1"
ROLES = Resource(GROUP, VERSION, "penstockroles", "PenstockRole")
