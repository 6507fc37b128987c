"""Allocates one region of every available kind of memory for the tests."""

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from penstock.core.errors import PenstockError
from penstock.core.native import native
from penstock.transfer import Arena, FileRegion, MemoryKind, ObjectRegion, Registration, TransferAgent

SIZE_BYTES = 64 << 20
STORAGE_BYTES = (32 if native is not None else 2) << 20
"""Less without native code: Python checksums 4 KiB blocks at 2 MB/s, so 32 MiB would take too long."""
PROCESS_KINDS = (MemoryKind.DRAM, MemoryKind.SHARED, MemoryKind.VRAM)
STORAGE_KINDS = (MemoryKind.FILE, MemoryKind.OBJECT)


class _Missing(Exception):  # noqa: N818 - a reason, not an error
    """This kind of memory is unavailable."""


class Memories:
    """Memory regions by kind; `missing` gives the reason for each unavailable kind."""

    def __init__(self, directory: Path | None) -> None:
        """Create it; entering its context allocates.

        Args:
            directory: directory of the file and objects; None for neither.
        """
        self.missing: dict[MemoryKind, str] = {}
        self._memory: dict[MemoryKind, object] = {}
        self._stack = ExitStack()
        self._directory = directory

    def __enter__(self) -> Self:
        makers: dict[MemoryKind, Callable[[], object]] = {
            MemoryKind.DRAM: lambda: np.ones(SIZE_BYTES, np.uint8),
            MemoryKind.SHARED: lambda: self._stack.enter_context(Arena.create(SIZE_BYTES)),
            MemoryKind.VRAM: _vram,
        }
        for kind, make in makers.items():
            try:
                self._memory[kind] = make()
            except (PenstockError, OSError, MemoryError, _Missing) as error:
                self.missing[kind] = str(error)
        if self._directory is not None:
            self._memory[MemoryKind.FILE] = FileRegion(
                self._directory / "file", STORAGE_BYTES, name=MemoryKind.FILE.value
            )
            self._memory[MemoryKind.OBJECT] = ObjectRegion(
                f"file://{self._directory}", STORAGE_BYTES, prefix="objects", name=MemoryKind.OBJECT.value
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._memory.clear()
        self._stack.close()

    def register(self, agent: TransferAgent) -> tuple[dict[MemoryKind, Registration], dict[MemoryKind, str]]:
        """Register each memory that an agent's transports support, named by its kind.

        Returns:
            (registrations, reasons for the memories not registered), by kind.
        """
        registered: dict[MemoryKind, Registration] = {}
        refusals: dict[MemoryKind, str] = {}
        for kind, memory in self._memory.items():
            try:
                registered[kind] = agent.register(memory, kind.value)
            except PenstockError as error:
                refusals[kind] = error.message
        return registered, refusals


def _vram() -> Any:
    """Allocate memory of the first GPU; imports torch only if there is one."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        raise _Missing("no NVIDIA device here (/dev/nvidia0)")
    if importlib.util.find_spec("torch") is None:
        raise _Missing("there is a device, and torch is not installed: pip install 'penstock-llm[engine]'")
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise _Missing(
            f"there is a device, and torch {torch.__version__} cannot use it: install a build for its CUDA"
        )
    return torch.ones(SIZE_BYTES, dtype=torch.uint8, device="cuda")
