"""Assigns this machine's GPUs to workers."""

from collections.abc import Mapping

from penstock.core.types.instances import Role
from penstock.engine.registry import engine_kind
from penstock.graph import RoleSpec


def device_numbers(roles: Mapping[Role, RoleSpec]) -> dict[tuple[Role, int], int]:
    """Give each GPU worker the index of its first GPU, from 0 in the order of the roles; its others have the next ones.

    Workers on CPUs and mock engines get none.
    """
    numbers: dict[tuple[Role, int], int] = {}
    free = 0
    for name, role in roles.items():
        if role.hardware == "cpu" or not engine_kind(role.engine).has_weights:
            continue
        for index in range(role.replicas):
            numbers[name, index] = free
            free += role.devices
    return numbers
