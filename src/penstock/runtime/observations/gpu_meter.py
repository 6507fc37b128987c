"""Power and use of a process' GPUs, by NVML."""

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

from penstock.core.cuda import visible_gpus
from penstock.core.log import get_logger
from penstock.runtime.observations.windows import GpuUse

_PERIOD_S = 1.0
_log = get_logger()


class GpuMeter:
    """Reads a process' GPUs each second, in a thread. One event loop owns it.

    Without the package `nvidia-ml-py`, a driver, or the right to ask it reads nothing. NVML counts GPUs as the PCI bus has them.
    """

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        """Read nothing yet; `open` makes one.

        Args:
            nvml: the module `pynvml`, initialised.
            handles: NVML's handles of the GPUs.
        """
        self.latest: GpuUse | None = None
        """What was read last; None if nothing can be."""
        self._nvml = nvml
        self._handles = tuple(handles)

    @classmethod
    def open(cls, names: Sequence[str]) -> Self | None:
        """Find GPUs by index or UUID; None where NVML does not know them, or is not here."""
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
            handles = [
                nvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdigit()
                else nvml.nvmlDeviceGetHandleByUUID(name)
                for name in names
            ]
        except nvml.NVMLError as error:
            _log.info("gpu_power_unknown", gpus=list(names), error=str(error))
            return None
        return cls(nvml, handles)

    def read(self) -> GpuUse | None:
        """Read all GPUs; None if one cannot be read. Takes some milliseconds."""
        nvml = self._nvml
        watts = limit_watts = busy = 0.0
        try:
            for handle in self._handles:
                watts += nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
                limit_watts += nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3
                busy += nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        except nvml.NVMLError:
            return None
        return GpuUse(watts=watts, limit_watts=limit_watts, utilization=busy / len(self._handles))

    async def run(self) -> None:
        """Read each second until it is cancelled."""
        while True:
            self.latest = await asyncio.to_thread(self.read)
            await asyncio.sleep(_PERIOD_S)


def gpu_names(first: int, count: int, environ: Mapping[str, str]) -> list[str]:
    """Name a worker's GPUs for NVML: those that CUDA_VISIBLE_DEVICES lists at these places, else their indices."""
    names = visible_gpus(environ)
    every = range(first, first + count)
    return [str(index) for index in every] if names is None else names[every.start : every.stop]
