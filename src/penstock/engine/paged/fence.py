"""Waiting for the end of a step on its device; only then may its blocks be announced, transferred or reused."""

from typing import Protocol

import torch


class Fence(Protocol):
    """Waits for the work queued on one device. Used on the thread that queues it."""

    def wait(self) -> None:
        """Return once all queued work is done and its writes are visible to every reader."""
        ...


class HostFence:
    """For a CPU, where calls return when they are done."""

    def wait(self) -> None:
        """Return at once."""


class CudaFence:
    """For a CUDA device, where kernels are queued: nothing else waits for a step that samples no token."""

    def __init__(self, device: torch.device) -> None:
        """Make a blocking event: the waiting thread sleeps instead of spinning on its core."""
        self._device = device
        self._event = torch.cuda.Event(blocking=True)

    def wait(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))
        self._event.synchronize()


def make_fence(device: torch.device) -> Fence:
    return CudaFence(device) if device.type == "cuda" else HostFence()
