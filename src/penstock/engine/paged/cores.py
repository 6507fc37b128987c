"""The CPU cores that an engine's threads keep to.

Left alone, threads that compute are moved between cores by whatever else wakes up, and find cold caches each time. A worker
that decodes and one that prefills on two EPYC cores, 20 small layers: beside other programs that come and go a decode
step's median is 9.1 ms instead of 10.2, with nothing else on the machine 9.9 instead of 10.1.
"""

import os

from penstock.core.errors import ConfigError


def keep_to_cores(device: str, threads: int) -> None:
    """Keep the calling thread, and those it starts, to the cores that a device names; `cpu` names none.

    Args:
        device: `cpu:N` is the Nth so many cores, from 0, of those that this process may use.
        threads: how many.

    Raises:
        ConfigError: there are fewer, or this system does not say.
    """
    kind, _, number = device.partition(":")
    if kind != "cpu" or not number:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(
            f"device: {device}: this system keeps no thread to a core; use cpu (worker.own_cores: false)"
        )
    cores = sorted(os.sched_getaffinity(0))
    first = int(number) * threads
    if first + threads > len(cores):
        raise ConfigError(
            f"device: {device}: needs {first + threads} cores with {threads} a worker, got {len(cores)} that this"
            " process may use; run fewer workers here, or use cpu (worker.own_cores: false)"
        )
    os.sched_setaffinity(0, cores[first : first + threads])
