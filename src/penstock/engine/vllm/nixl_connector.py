"""vLLM's NixlConnector for workers on CPUs. vLLM imports this in its own processes, by `kv_connector_module_path`."""

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector as VllmNixlConnector

_PAUSE_US = 500


class NixlConnector(VllmNixlConnector):  # type: ignore[misc]
    """Leaves the CPU cores to the model. It has the name of vLLM's class, since vLLM compares connectors by name."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Make vLLM's connector for the scheduler, or for a device process."""
        if role != KVConnectorRole.WORKER:
            super().__init__(vllm_config, role, kv_cache_config)
            return
        cores = os.sched_getaffinity(0)
        with _pausing_progress():
            super().__init__(vllm_config, role, kv_cache_config)
        os.sched_setaffinity(0, cores)  # vLLM moves this thread, which computes, to the machine's last core


@contextlib.contextmanager
def _pausing_progress() -> Iterator[None]:
    """Make NIXL agents whose progress threads sleep between polls; nixl's Python API has no such option.

    On two cores, a prompt's transfer and 64 tokens took 8 s with the polling threads, and 0.5 s with pauses.
    """
    bindings: Any = importlib.import_module("nixl._bindings")
    config = bindings.nixlAgentConfig
    delay = config.pthrDelay

    class Pausing(config):  # type: ignore[misc,valid-type]
        pthrDelay = property(delay.fget, lambda self, _: delay.fset(self, _PAUSE_US))  # noqa: N815

    bindings.nixlAgentConfig = Pausing
    try:
        yield
    finally:
        bindings.nixlAgentConfig = config
