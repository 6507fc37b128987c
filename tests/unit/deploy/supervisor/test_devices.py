from penstock.core.types.instances import Role
from penstock.deploy.supervisor.devices import device_numbers
from penstock.graph import RoleSpec


def test_only_workers_that_compute_on_a_gpu_are_counted():
    roles = {
        Role.AGGREGATED: RoleSpec(engine="paged", replicas=1),
        Role.PREFILL: RoleSpec(engine="paged", hardware="h100", replicas=2),
        Role.DECODE: RoleSpec(engine="paged", hardware="h100", replicas=1),
    }
    assert device_numbers(roles) == {(Role.PREFILL, 0): 0, (Role.PREFILL, 1): 1, (Role.DECODE, 0): 2}
    mock = {**roles, Role.PREFILL: RoleSpec(engine="mock", hardware="h100", replicas=2)}
    assert device_numbers(mock) == {(Role.DECODE, 0): 0}
