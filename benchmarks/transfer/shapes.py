"""Shapes of transfers, the pools that they move between, and the limit that fio measures."""

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.descriptors import OffsetArray, TransferOp
from penstock.core.errors import TransferError
from penstock.transfer import Arena, StorageConfig, TransferConfig

POOL_BYTES = 256 << 20
"""On each side: far more than a CPU cache."""
SEED = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """`count` ranges of `size_bytes` each."""

    name: str
    count: int
    size_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.size_bytes

    def blocks(self) -> tuple[OffsetArray, OffsetArray]:
        """Draw which blocks of the pool, here and there; the peer's driver draws the same."""
        random = np.random.default_rng(SEED)
        slots = POOL_BYTES // self.size_bytes
        here, there = (random.permutation(slots)[: self.count].astype(np.uint64) for _ in range(2))
        return here, there


SHAPES = (
    Shape("1x128MiB", 1, 128 << 20),
    Shape("2048x32KiB", 2048, 32 << 10),
    Shape("512x256KiB", 512, 256 << 10),
    Shape("128x1MiB", 128, 1 << 20),
)
SMALL = Shape("4KiB", 1, 4096)


def make_pool(memory: str) -> object:
    """Take the pool's memory: an arena, or private memory that is touched."""
    return Arena.create(POOL_BYTES) if memory == "shared" else np.ones(POOL_BYTES, np.uint8)


def config_for(transport: str, listen: str) -> TransferConfig:
    return TransferConfig(listen=(listen,), transports=(transport,), heartbeat_timeout_s=30)


_TIMEOUT_S = 120
_BLOCK_BYTES_MAX = 1 << 20


class Fio:
    """fio with O_DIRECT, as many requests under way as transport `file` has, and blocks of the shape, up to 1 MiB."""

    name = "fio"

    def __init__(self, directory: Path) -> None:
        """Write into this directory.

        Raises:
            TransferError: fio is not installed.
        """
        if shutil.which("fio") is None:
            raise TransferError("fio is not installed: apt-get install fio")
        self._path = directory / "fio"

    async def move(self, op: TransferOp, shape: Shape, repeats: int) -> list[float]:
        return [await self._run(op, shape) for _ in range(repeats + 1)][1:]

    async def idle_share(self, seconds: float) -> float | None:
        del seconds
        return None

    async def _run(self, op: TransferOp, shape: Shape) -> float:
        fio = await asyncio.create_subprocess_exec(
            "fio", "--name=limit", f"--filename={self._path}", f"--size={POOL_BYTES}", f"--io_size={shape.num_bytes}",
            f"--rw=rand{op.value}", f"--bs={min(shape.size_bytes, _BLOCK_BYTES_MAX)}", "--direct=1", "--ioengine=libaio",
            f"--iodepth={StorageConfig().io_threads}", "--output-format=json",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                out, errors = await fio.communicate()
        finally:
            if fio.returncode is None:
                fio.kill()
                await fio.wait()
        if fio.returncode:
            raise TransferError(
                f"fio ended with {fio.returncode}: {errors.decode(errors='replace').strip()[-300:]}"
            )
        job: dict[str, Any] = json.loads(out)["jobs"][0][op.value]
        return float(job["io_bytes"]) / float(job["bw_bytes"])
