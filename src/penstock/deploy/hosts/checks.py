"""What may be done with the workers of several hosts, by how all of them are."""

from penstock.core.errors import RequestError
from penstock.core.types.instances import Replica, ReplicaState, Role, Scale


def find(scale: Scale, name: str) -> Replica:
    """Give a worker; raises RequestError (404) where there is none of this name."""
    for replica in scale.replicas:
        if replica.name == name:
            return replica
    known = ", ".join(replica.name for replica in scale.replicas)
    raise RequestError(f"there is no worker {name!r} here; known: {known}", http_status=404)


def ready_roles(scale: Scale, gone: set[str], *, without: str | None = None) -> frozenset[Role]:
    """Give the roles that ready workers have once those in `gone` have left, without those whose names end in `without`."""
    return frozenset(
        replica.role
        for replica in scale.replicas
        if replica.state is ReplicaState.READY
        and replica.name not in gone
        and not (without and replica.name.endswith(without))
    )


def check_serving(scale: Scale, gone: set[str]) -> None:
    """Check that requests are still answered without the workers in `gone`; raises RequestError (409)."""
    serving = [
        replica.name
        for replica in scale.replicas
        if replica.role is not Role.PREFILL and replica.state is ReplicaState.READY
    ]
    leaving = [name for name in serving if name in gone]
    if leaving and len(leaving) == len(serving):
        raise conflict(f"{leaving[0]} is the last worker that answers requests; add another first")


def conflict(message: str) -> RequestError:
    """Make the error of a change that cannot be now."""
    return RequestError(message, http_status=409)
