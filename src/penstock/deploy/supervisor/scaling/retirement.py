"""Whether workers of a pool may leave: requests must still be answered without them.

`elsewhere` are roles that ready workers of the deployment's other hosts have.
"""

from collections.abc import Mapping, Sequence

from penstock.core.errors import RequestError
from penstock.core.types.instances import Role
from penstock.deploy.supervisor.scaling.pool_worker import PoolWorker
from penstock.graph import RoleSpec


def check_serving(
    workers: Sequence[PoolWorker],
    leaving: Sequence[PoolWorker],
    verb: str,
    elsewhere: frozenset[Role] = frozenset(),
) -> None:
    """Check that requests are still answered without the workers in `leaving`; raises RequestError (409)."""
    if elsewhere - {Role.PREFILL}:
        return
    left = [worker for worker in workers if worker.answers and worker not in leaving]
    last = next((worker for worker in leaving if worker.is_serving), None)
    if not any(worker.answers for worker in leaving) or any(worker.is_serving for worker in left):
        return
    if left and last is None:
        return
    name = last.name if last is not None else leaving[0].name
    starting = ", ".join(worker.name for worker in left)
    wait = f"wait until one of {starting} is ready" if left else f"add another before you {verb} it"
    raise conflict(f"{name} is the last worker that answers requests; {wait}")


def check_prefill(
    workers: Sequence[PoolWorker], leaving: Sequence[PoolWorker], elsewhere: frozenset[Role] = frozenset()
) -> None:
    """Check that decode workers that compute no prompts themselves keep a prefill worker; raises RequestError (409)."""
    if Role.PREFILL in elsewhere:
        return
    prefill = [
        worker
        for worker in workers
        if worker.role is Role.PREFILL and worker.target is None and not worker.is_draining
    ]
    ready = [worker for worker in prefill if worker.running.ready.is_set()]
    needed = any(
        worker.role is Role.DECODE
        and worker.answers
        and worker.running.needs_prefill
        and worker not in leaving
        for worker in workers
    )
    if needed and any(worker in leaving for worker in ready) and all(worker in leaving for worker in ready):
        raise conflict(
            f"{ready[0].name} is the last prefill worker that is ready, and decode workers of its engine compute no prompts;"
            " add another and wait until it is ready"
        )


def check_adapters(
    roles: Mapping[Role, RoleSpec],
    workers: Sequence[PoolWorker],
    leaving: Sequence[PoolWorker],
    elsewhere: frozenset[Role] = frozenset(),
) -> None:
    """Check that every adapter still has a worker; raises RequestError (409)."""
    for role, spec in roles.items():
        if role in elsewhere and spec.adapters_per_worker is None:
            continue  # each worker of the role has them all
        own = [worker for worker in workers if worker.home is role and not worker.is_draining]
        left = {name for worker in own if worker not in leaving for name in spec.adapters_of(worker.index)}
        lost = {name for worker in own for name in spec.adapters_of(worker.index)} - left
        if lost:
            raise conflict(
                f"no other worker has adapter {min(lost)!r} (roles.{role}.adapters_per_worker); retire another worker"
            )


def conflict(message: str) -> RequestError:
    """Make the error of a change that cannot be now."""
    return RequestError(message, http_status=409)
