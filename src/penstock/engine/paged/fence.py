"""The end of a step on its device: until then, others must not see its blocks, nor get them."""

from typing import Protocol

import torch


class Fence(Protocol):
    """Waits for what was queued on one device. Used on the thread that queues."""

    def wait(self) -> None:
        """Return once all of it is done, and what it wrote is there for whoever reads."""
        ...


class HostFence:
    """A CPU's: calls return when they are done."""

    def wait(self) -> None:
        """Return at once."""


class CudaFence:
    """A CUDA device's: kernels are queued, and those of a step that samples nothing are waited for by nobody else."""

    def __init__(self, device: torch.device) -> None:
        """Make the event that marks the end of a step; who waits for it sleeps, so that its core is free for others."""
        self._device = device
        self._event = torch.cuda.Event(blocking=True)

    def wait(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))
        self._event.synchronize()


def make_fence(device: torch.device) -> Fence:
    return CudaFence(device) if device.type == "cuda" else HostFence()
