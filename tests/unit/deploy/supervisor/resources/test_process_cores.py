"""Which cores workers and frontends get."""

import pytest

from penstock.core.errors import ConfigError, RequestError
from penstock.core.types.instances import Role
from penstock.deploy.supervisor.resources.process_cores import ProcessCores, expect_cores
from penstock.graph import Graph


class Cores(ProcessCores):
    """The cores of a graph's workers, by role and index."""

    def __init__(self, usable, roles):
        super().__init__(usable)
        for role, spec in Graph.model_validate({"model": "m", "roles": roles}).roles.present().items():
            for index in range(spec.replicas):
                self.take(f"{role}.{index}", role, spec)

    def of_engine(self, role, index=None):
        return super().of_engine(role if index is None else f"{role}.{index}")

    def of_process(self, role="", index=None):
        return super().of_process(role if index is None else f"{role}.{index}")


def cores_of(usable, roles):
    return Cores(usable, roles)


def test_prefill_workers_and_frontends_keep_off_who_decodes() -> None:
    cores = cores_of({4, 5}, {"prefill": {}, "decode": {}})
    assert [cores.of_engine(Role.PREFILL, 0), cores.of_engine(Role.DECODE, 0)] == [4, 5]
    assert cores.of_process(Role.PREFILL, 0) == (4,)
    assert cores.of_process() == (4,)
    assert cores.of_process(Role.DECODE, 0) == (4, 5), "its loop may run where there is room"


def test_decode_workers_keep_off_each_other() -> None:
    cores = cores_of({0, 1, 2, 3}, {"prefill": {}, "decode": {"replicas": 2}})
    decoding = {cores.of_engine(Role.DECODE, index) for index in range(2)}
    assert len(decoding) == 2
    for index in range(2):
        assert set(cores.of_process(Role.DECODE, index)) & decoding == {cores.of_engine(Role.DECODE, index)}
    rest = tuple(sorted({0, 1, 2, 3} - decoding))
    assert cores.of_process() == cores.of_process(Role.PREFILL, 0) == rest
    assert cores.of_engine(Role.PREFILL, 0) in rest


def test_where_all_cores_decode_nobody_is_kept_off() -> None:
    cores = cores_of({0, 1}, {"prefill": {"hardware": "h100"}, "decode": {"replicas": 2}})
    assert [cores.of_engine(Role.DECODE, index) for index in range(2)] == [0, 1]
    assert cores.of_process() == cores.of_process(Role.DECODE, 1) == ()


def test_aggregated_workers_keep_nobody_off() -> None:
    cores = cores_of({0, 1}, {"aggregated": {"replicas": 2}})
    assert [cores.of_engine(Role.AGGREGATED, index) for index in range(2)] == [0, 1]
    assert cores.of_process() == cores.of_process(Role.AGGREGATED, 0) == (0, 1)


def test_only_engines_that_compute_here_get_cores() -> None:
    roles = {"prefill": {"hardware": "h100", "replicas": 4}, "decode": {}}
    cores = cores_of({0, 1}, roles)
    assert cores.of_engine(Role.DECODE, 0) == 0
    assert cores.of_engine(Role.PREFILL, 0) is None
    assert cores.of_process(Role.PREFILL, 0) == (1,)
    mock = cores_of({0}, {"aggregated": {"engine": "mock", "replicas": 4}})
    assert mock.of_engine(Role.AGGREGATED, 3) is None


def test_nothing_unless_it_is_asked_for() -> None:
    cores = cores_of(None, {"prefill": {}, "decode": {}})
    assert cores.of_engine(Role.DECODE, 0) is None
    assert cores.of_process() == cores.of_process(Role.DECODE, 0) == ()


def test_too_few_cores() -> None:
    roles = {"prefill": {"replicas": 2}, "decode": {}}
    graph = Graph.model_validate({"model": "m", "roles": roles})
    expect_cores(graph.roles.present(), {0, 1, 2})
    with pytest.raises(
        ConfigError, match=r"worker\.own_cores: 3 workers compute on CPU cores, got 2 .* run fewer"
    ):
        expect_cores(graph.roles.present(), {0, 1})


def test_a_freed_core_is_given_again() -> None:
    cores = ProcessCores({4, 5})
    spec = Graph.model_validate({"model": "m", "roles": {"aggregated": {}}}).roles.present()[Role.AGGREGATED]
    assert [cores.take(name, Role.AGGREGATED, spec) for name in ("a", "b")] == [4, 5]
    assert cores.room(spec) == 0
    with pytest.raises(RequestError, match=r"c needs a core of its own .*; taken: 4 by a, 5 by b"):
        cores.take("c", Role.AGGREGATED, spec)
    cores.release("a")
    assert cores.take("c", Role.AGGREGATED, spec) == 4
