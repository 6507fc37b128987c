"""Which GPUs workers get."""

import pytest

from penstock.core.errors import RequestError
from penstock.deploy.supervisor.resources.devices import Devices, count_devices, devices_of
from penstock.graph import RoleSpec


def test_only_workers_that_compute_on_a_gpu_need_one():
    assert devices_of(RoleSpec(engine="paged")) == 0
    assert devices_of(RoleSpec(engine="mock", hardware="h100")) == 0
    assert devices_of(RoleSpec(engine="paged", hardware="h100")) == 1
    assert devices_of(RoleSpec(engine="vllm", hardware="h100", tensor_parallel=4)) == 4


def test_no_device_is_given_twice_and_a_freed_one_is_given_again():
    devices = Devices(8)
    assert devices.take("a", 2) == (0, 1)
    assert devices.take("b", 4) == (2, 3, 4, 5)
    devices.release("a")
    assert devices.room(2) == 2
    assert devices.take("c", 1) == (0,)
    assert devices.take("d", 2) == (6, 7), "consecutive ones"
    assert devices.take("e", 0) == ()
    devices.check()


def test_who_has_which_device_is_said_where_none_is_free():
    devices = Devices(2)
    devices.take("worker-1", 1)
    devices.take("worker-2", 1)
    with pytest.raises(
        RequestError,
        match=r"worker-3 needs a free GPU of this machine's 2; taken: 0 by worker-1, 1 by worker-2",
    ):
        devices.take("worker-3", 1)
    devices.release("worker-1")
    with pytest.raises(RequestError, match=r"needs 2 free GPUs in a row"):
        devices.take("worker-3", 2)
    assert devices.room(1) == 1


def test_an_unknown_number_is_no_limit():
    devices = Devices(None)
    assert [devices.take(name, 2) for name in "abc"] == [(0, 1), (2, 3), (4, 5)]
    devices.release("b")
    assert devices.take("d", 1) == (2,)
    assert devices.room(1) is None


def test_the_visible_devices_are_counted(monkeypatch):
    for value, count in (("0,1,2", 3), ("GPU-a,GPU-b", 2), ("", 0), ("-1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert count_devices() == count


def test_otherwise_device_files_are_counted(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert count_devices(tmp_path) is None
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / "dev" / name).touch()
    assert count_devices(tmp_path) == 2
