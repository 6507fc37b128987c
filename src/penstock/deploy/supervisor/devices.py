"""Assigns this machine's GPUs to workers."""

from collections.abc import Mapping

from penstock.core.types.instances import Role
from penstock.graph import RoleSpec


def device_numbers(roles: Mapping[Role, RoleSpec]) -> dict[tuple[Role, int], int]:
    """Assign GPU indices from 0 to GPU workers, in the order of the roles.

    Workers on CPUs and mock engines get none.
    """
    on_gpus = [
        (name, index)
        for name, role in roles.items()
        if role.engine != "mock" and role.hardware != "cpu"
        for index in range(role.replicas)
    ]
    return {worker: number for number, worker in enumerate(on_gpus)}
