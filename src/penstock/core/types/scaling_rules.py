"""Which changes of a deployment's workers every scaling connector refuses: pure functions of a `Scale`.

They raise RequestError with the status that `seams.ScalingConnector` names.
"""

from collections.abc import Collection, Sequence

from penstock.core.errors import RequestError
from penstock.core.types.instances import Replica, ReplicaState, Role, Scale


def check_add(scale: Scale, role: Role, count: int, *, revision: int | None = None) -> None:
    """Check that `count` workers may be added to a role now.

    Args:
        scale: the deployment as it is now.
        role: the role that gets the workers.
        count: workers to start.
        revision: the revision that the caller has seen; None accepts any.
    """
    check_revision(scale, revision)
    limit = next((limit for limit in scale.limits if limit.role is role), None)
    if limit is None:
        known = ", ".join(limit.role for limit in scale.limits)
        raise RequestError(
            f"role {role} is not of this deployment, which has {known or 'none'}; describe it in the graph, with"
            " replicas 0 if need be",
            http_status=404,
        )
    if count < 1:
        raise RequestError(f"count: must be >= 1, got {count}")
    if limit.room is not None and count > limit.room:
        workers = "1 worker" if count == 1 else f"{count} workers"
        raise conflict(f"{role}: {workers} more cannot be added, {limit.room} can: {limit.why}")


def check_retire(
    scale: Scale, names: Sequence[str], *, revision: int | None = None, elsewhere: Collection[Role] = ()
) -> tuple[Replica, ...]:
    """Check that workers may end now, and give them.

    Args:
        scale: the deployment as it is now.
        names: the workers; a name that comes twice counts once.
        revision: the revision that the caller has seen; None accepts any.
        elsewhere: roles of ready workers that serve the same deployment and are not in `scale`.
    """
    check_revision(scale, revision)
    leaving = tuple(find_replica(scale, name) for name in dict.fromkeys(names))
    for replica in leaving:
        if replica.state is ReplicaState.DRAINING:
            raise conflict(f"{replica.name} drains already; it ends by itself")
    check_serving(scale, names, elsewhere)
    _check_free(scale)
    return leaving


def check_flip(
    scale: Scale, name: str, role: Role, *, revision: int | None = None, elsewhere: Collection[Role] = ()
) -> Replica:
    """Check that a worker may change to `role` now, and give the worker; arguments as for `check_retire`."""
    check_revision(scale, revision)
    replica = find_replica(scale, name)
    if replica.state is ReplicaState.FLIPPING:
        raise conflict(f"{name} is becoming {replica.role} already; wait until it has")
    if replica.state is not ReplicaState.READY:
        raise conflict(f"{name} is not ready: {replica.phase or replica.state}; choose another worker")
    if replica.role is role:
        raise conflict(f"{name} is {role} already; choose another role")
    if role is Role.PREFILL:
        check_serving(scale, [name], elsewhere)
    _check_free(scale)
    return replica


def check_revision(scale: Scale, revision: int | None) -> None:
    """Check that nobody has scaled since the caller saw `revision`; None accepts any."""
    if revision is not None and revision != scale.revision:
        raise conflict(
            f"revision: {scale.changed_by or 'somebody'} has scaled meanwhile (revision {scale.revision}, expected"
            f" {revision}); look again and repeat"
        )


def check_serving(scale: Scale, gone: Collection[str], elsewhere: Collection[Role] = ()) -> None:
    """Check that requests are still answered without the workers in `gone`.

    A ready worker has to stay. Before any worker is ready, one that will answer requests has to stay.

    Args:
        scale: the deployment as it is now.
        gone: names of the workers that leave or compute only prompts from now on.
        elsewhere: roles of ready workers that serve the same deployment and are not in `scale`.
    """
    if any(role is not Role.PREFILL for role in elsewhere):
        return
    answering = [
        replica
        for replica in scale.replicas
        if replica.role is not Role.PREFILL and replica.state is not ReplicaState.DRAINING
    ]
    left = [replica for replica in answering if replica.name not in gone]
    leaving = [replica for replica in answering if replica.name in gone]
    last = next((replica for replica in leaving if replica.state is ReplicaState.READY), None)
    if not leaving or any(replica.state is ReplicaState.READY for replica in left) or (left and last is None):
        return
    starting = ", ".join(replica.name for replica in left)
    fix = f"wait until one of {starting} is ready" if left else "add another first"
    raise conflict(f"{(last or leaving[0]).name} is the last worker that answers requests; {fix}")


def ready_roles(scale: Scale, gone: Collection[str], *, without: str | None = None) -> frozenset[Role]:
    """Give the roles of ready workers that are not in `gone` and whose names do not end in `without`."""
    return frozenset(
        replica.role
        for replica in scale.replicas
        if replica.state is ReplicaState.READY
        and replica.name not in gone
        and not (without and replica.name.endswith(without))
    )


def find_replica(scale: Scale, name: str) -> Replica:
    """Give a worker by its name; raises RequestError (404) where there is none."""
    for replica in scale.replicas:
        if replica.name == name:
            return replica
    known = ", ".join(replica.name for replica in scale.replicas)
    raise RequestError(f"there is no worker {name!r} here; known: {known}", http_status=404)


def conflict(message: str) -> RequestError:
    """Make the error of a change that cannot be made now."""
    return RequestError(message, http_status=409)


def _check_free(scale: Scale) -> None:
    if scale.held:
        raise conflict(scale.held)
