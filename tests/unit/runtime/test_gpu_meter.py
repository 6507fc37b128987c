"""GPUs by NVML, with a library of the test's own."""
# ruff: noqa: N802 - the names are those of NVML

import asyncio
import sys
from types import SimpleNamespace

import pytest

from penstock.runtime.observations import GpuMeter, GpuUse, gpu_names

pytestmark = pytest.mark.virtual


class NVMLError(Exception):
    """As in `pynvml`."""


class Nvml:
    """A machine of two GPUs: the first draws 300 W at 80 %, the second 100 W at 20 %."""

    NVMLError = NVMLError

    def __init__(self):
        self.is_broken = False
        self.begun = 0

    def nvmlInit(self):
        self.begun += 1

    def nvmlDeviceGetHandleByIndex(self, index):
        if index > 1:
            raise NVMLError("Not Found")
        return index

    def nvmlDeviceGetHandleByUUID(self, name):
        return {"GPU-a": 0, "GPU-b": 1}[name]

    def nvmlDeviceGetPowerUsage(self, handle):
        if self.is_broken:
            raise NVMLError("GPU is lost")
        return (300_000, 100_000)[handle]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=(80, 20)[handle], memory=1)


@pytest.fixture
def nvml(monkeypatch):
    library = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_gpus_are_read_together(nvml):
    assert GpuMeter.open(["0", "1"]).read() == GpuUse(watts=400.0, utilization=0.5)
    assert GpuMeter.open(["GPU-b"]).read() == GpuUse(watts=100.0, utilization=0.2)
    assert nvml.begun == 2


def test_what_is_not_there_is_not_read(nvml, monkeypatch):
    assert GpuMeter.open(["7"]) is None
    meter = GpuMeter.open(["0"])
    nvml.is_broken = True
    assert meter.read() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert GpuMeter.open(["0"]) is None


async def test_a_meter_reads_each_second(nvml):
    meter = GpuMeter.open(["0"])
    assert meter.latest is None
    async with asyncio.TaskGroup() as group:
        task = group.create_task(meter.run())
        await asyncio.sleep(0.5)
        assert meter.latest.watts == 300.0
        nvml.is_broken = True
        await asyncio.sleep(1.0)
        assert meter.latest is None
        task.cancel()


def test_names_are_those_of_visible_devices():
    assert gpu_names(1, 2, {}) == ["1", "2"]
    assert gpu_names(1, 2, {"CUDA_VISIBLE_DEVICES": "4, 5,GPU-c"}) == ["5", "GPU-c"]
    assert gpu_names(0, 2, {"CUDA_VISIBLE_DEVICES": "4"}) == ["4"]


def test_the_mean_of_several_times():
    uses = [
        GpuUse(watts=100, utilization=0.2),
        GpuUse(watts=300, utilization=0.6),
    ]
    assert GpuUse.mean(uses) == GpuUse(watts=200, utilization=pytest.approx(0.4))
    assert GpuUse.mean([]) is None
