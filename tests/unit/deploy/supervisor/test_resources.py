"""Which GPUs, ports and cores workers get: none twice, and freed ones again."""

import pytest

from penstock.core.errors import ConfigError, RequestError
from penstock.core.types.instances import Role
from penstock.deploy.supervisor.resources import (
    Devices,
    PortRange,
    Ports,
    ProcessCores,
    count_devices,
    devices_of,
    expect_cores,
)
from penstock.graph import Graph, RoleSpec

A, P, D = Role.AGGREGATED, Role.PREFILL, Role.DECODE
GPU = {"hardware": "h100"}


@pytest.mark.parametrize(
    ("role", "count"),
    [
        ({"engine": "paged"}, 0),
        ({"engine": "mock", **GPU}, 0),
        ({"engine": "paged", **GPU}, 1),
        ({"engine": "vllm", **GPU, "tensor_parallel": 4}, 4),
    ],
)
def test_only_workers_that_compute_on_a_gpu_need_one(role, count):
    assert devices_of(RoleSpec(**role)) == count


def test_devices_are_consecutive_and_who_has_which_is_said_where_none_is_free():
    devices = Devices(8)
    assert devices.take("a", 2) == (0, 1)
    assert devices.take("b", 4) == (2, 3, 4, 5)
    devices.release("a")
    assert devices.room(2) == 2
    assert devices.take("c", 1) == (0,)
    assert devices.take("d", 2) == (6, 7)
    assert devices.take("e", 0) == ()
    devices.check()
    with pytest.raises(RequestError, match="needs 2 free GPUs in a row"):
        devices.take("f", 2)
    devices.take("f", 1)
    said = r"g needs a free GPU of this machine's 8; taken: 0 by c, 1 by f, 2 by b"
    with pytest.raises(RequestError, match=said):
        devices.take("g", 1)


def test_the_visible_devices_are_counted_or_else_device_files(monkeypatch, tmp_path):
    for value, count in (("0,1,2", 3), ("GPU-a,GPU-b", 2), ("", 0), ("-1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert count_devices() == count
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert count_devices(tmp_path) is None
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / "dev" / name).touch()
    assert count_devices(tmp_path) == 2


def test_each_worker_has_two_ports_of_the_range():
    ports = Ports(PortRange.parse("7500-7504"))
    assert ports.room() == 2
    assert (ports.take("a"), ports.take("b")) == ((7500, 7501), (7502, 7503))
    said = "c needs 2 ports, and runtime.ports 7500-7504 has 5 for 2 workers"
    with pytest.raises(RequestError, match=said):
        ports.take("c")
    ports.release("a")
    assert ports.take("c") == (7500, 7501)
    anything = Ports(None)
    assert (anything.take("a"), anything.room()) == ((), None)


def cores_of(usable, roles):
    """Give the cores of a graph's workers, named by role and number."""
    cores = ProcessCores(usable)
    for role, spec in Graph.model_validate({"model": "m", "roles": roles}).roles.present().items():
        for number in range(spec.replicas):
            cores.take(f"{role}.{number}", role, spec)
    return cores


@pytest.mark.parametrize(
    ("usable", "roles", "engines", "processes"),
    [
        ({4, 5}, {"prefill": {}, "decode": {}}, {"prefill.0": 4, "decode.0": 5}, {"": (4,), "prefill.0": (4,), "decode.0": (4, 5)}),
        ({0, 1}, {"prefill": GPU, "decode": {"replicas": 2}}, {"decode.0": 0, "decode.1": 1}, {"": (), "decode.1": ()}),
        ({0, 1}, {"aggregated": {"replicas": 2}}, {"aggregated.0": 0, "aggregated.1": 1}, {"": (0, 1), "aggregated.0": (0, 1)}),
        ({0, 1}, {"prefill": GPU | {"replicas": 4}, "decode": {}}, {"decode.0": 0, "prefill.0": None}, {"prefill.0": (1,)}),
        ({0}, {"aggregated": {"engine": "mock", "replicas": 4}}, {"aggregated.3": None}, {}),
        (None, {"prefill": {}, "decode": {}}, {"decode.0": None}, {"": (), "decode.0": ()}),
    ],
    ids=["others keep off who decodes", "all cores decode", "aggregated", "only who computes here", "mock", "not asked for"],
)  # fmt: skip
def test_cores_of_engines_and_of_other_processes(usable, roles, engines, processes):
    cores = cores_of(usable, roles)
    assert {name: cores.of_engine(name) for name in engines} == engines
    assert {name: cores.of_process(name) for name in processes} == processes


def test_too_few_cores_and_a_freed_one():
    roles = {"prefill": {"replicas": 2}, "decode": {}}
    graph = Graph.model_validate({"model": "m", "roles": roles})
    expect_cores(graph.roles.present(), {0, 1, 2})
    said = r"worker\.own_cores: 3 workers compute on CPU cores, got 2 .* run fewer"
    with pytest.raises(ConfigError, match=said):
        expect_cores(graph.roles.present(), {0, 1})
    cores, spec = ProcessCores({4, 5}), RoleSpec()
    assert [cores.take(name, A, spec) for name in ("a", "b")] == [4, 5]
    assert cores.room(spec) == 0
    with pytest.raises(RequestError, match=r"c needs a core of its own .*; taken: 4 by a, 5 by b"):
        cores.take("c", A, spec)
    cores.release("a")
    assert cores.take("c", A, spec) == 4
