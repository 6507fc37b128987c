"""Which of this machine's GPUs a deployment's workers compute on."""

from collections.abc import Mapping

from penstock.core.types.instances import Role
from penstock.graph import RoleSpec


def device_numbers(roles: Mapping[Role, RoleSpec]) -> dict[tuple[Role, int], int]:
    """Number the GPUs from 0, one for each worker that computes on one, in the order of the roles.

    Workers on CPUs take none, nor do mock engines, which compute nothing.
    """
    on_gpus = [
        (name, index)
        for name, role in roles.items()
        if role.engine != "mock" and role.hardware != "cpu"
        for index in range(role.replicas)
    ]
    return {worker: number for number, worker in enumerate(on_gpus)}
