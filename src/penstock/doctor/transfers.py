"""Measures transports between the memories of this machine, within a process and between two."""

import asyncio
import importlib
import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import numpy as np

from penstock.core import log
from penstock.core.errors import PenstockError, TransferError
from penstock.core.native import native
from penstock.doctor.findings import LOOPBACK, PROCESS
from penstock.transfer import (
    Arena,
    FileRegion,
    MemoryKind,
    ObjectRegion,
    Peer,
    PreparedTransfer,
    Registration,
    RemoteRegion,
    TransferAgent,
    TransferConfig,
    TransferOp,
)

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


_BLOCK_BYTES = 256 << 10
_SMALL_BYTES = 4096
_RUN_S = 0.1
"""Seconds of measurement per figure, after one warm-up run."""
_RUNS_MAX, _SMALL_RUNS_MAX = 5, 100
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Bandwidth and latency between two memories; GB are 10^9 bytes."""

    read_gb_per_s: float
    write_gb_per_s: float
    latency_us: float


async def measure(
    agent: TransferAgent, local: Registration, remote: Registration | RemoteRegion, peer: Peer | None
) -> Figures:
    """Measure reads and writes.

    Memory is moved in scattered blocks of 256 KiB, from the first half of one region to the second half of the other, so that
    both may be the same region. Storage is written and read sequentially.

    Raises:
        TransferRefused: the agent's transports do not support the pair.
        TransferError, DeadlineExceeded: a transfer failed.
    """
    if remote.info.kind in STORAGE_KINDS:
        large = agent.prepare(local.ranges(0, STORAGE_BYTES), remote.ranges(0, STORAGE_BYTES), peer)
        num_bytes = STORAGE_BYTES
    else:
        count = SIZE_BYTES // _BLOCK_BYTES // 2
        order = np.random.default_rng(1).permutation(count)
        large = agent.prepare(
            local.blocks(np.arange(count), _BLOCK_BYTES), remote.blocks(count + order, _BLOCK_BYTES), peer
        )
        num_bytes = count * _BLOCK_BYTES
    far = remote.info.size_bytes - _SMALL_BYTES
    small = agent.prepare(local.ranges(0, _SMALL_BYTES), remote.ranges(far, _SMALL_BYTES), peer)
    write_s = await _seconds(_posting(large, TransferOp.WRITE), _RUNS_MAX)
    read_s = await _seconds(_posting(large, TransferOp.READ), _RUNS_MAX)
    small_s = await _seconds(_posting(small, TransferOp.READ), _SMALL_RUNS_MAX)
    return Figures(num_bytes / read_s / 1e9, num_bytes / write_s / 1e9, small_s * 1e6)


def _posting(prepared: PreparedTransfer, op: TransferOp) -> Callable[[], Awaitable[None]]:
    return lambda: prepared.post(op, timeout_s=_TIMEOUT_S).wait()


async def _seconds(run: Callable[[], Awaitable[None]], runs_max: int) -> float:
    """Give the median seconds of several runs."""
    await run()
    took: list[float] = []
    while len(took) < runs_max and sum(took) < _RUN_S:
        began_s = perf_counter()
        await run()
        took.append(perf_counter() - began_s)
    return median(took)


NETWORKED = ("tcp",)
"""Transports that use the link's kind of socket: tested over TCP, as between hosts."""
_START_S = 20.0
_STOP_S = 5.0


@asynccontextmanager
async def neighbour() -> AsyncIterator[dict[str, bytes]]:
    """Run the other process; yields the metadata of its agents by place.

    Raises:
        TransferError: the process does not start.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", __name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        async with asyncio.timeout(_START_S):
            line = await child.stdout.readline()
            if not line:
                said = (await child.stderr.read()).decode(errors="replace").strip().splitlines()
                raise TransferError(
                    f"another process could not start: {said[-1] if said else 'no reason given'}"
                )
        yield {place: bytes.fromhex(text) for place, text in json.loads(line).items()}
    except TimeoutError as error:
        raise TransferError(f"another process was not ready within {_START_S:g} s") from error
    finally:
        child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), _STOP_S)
        except TimeoutError:
            child.kill()
            await child.wait()


async def _main() -> None:
    near = TransferConfig(listen=("unix",))
    far = TransferConfig(listen=("tcp://127.0.0.1:0",), transports=NETWORKED)
    with Memories(None) as memories:
        async with TransferAgent("neighbour", near) as by_unix, TransferAgent("loopback", far) as by_tcp:
            for agent in (by_unix, by_tcp):
                memories.register(agent)
            shown = {PROCESS: by_unix.metadata().hex(), LOOPBACK: by_tcp.metadata().hex()}
            print(json.dumps(shown), flush=True)  # noqa: T201 - read by the doctor
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    log.configure("error", process="neighbour")
    asyncio.run(_main())
