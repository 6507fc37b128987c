"""The disk's speed by fio, the limit of transport `file`."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.transfer.shapes import POOL_BYTES, Shape
from penstock.core.descriptors import TransferOp
from penstock.core.errors import TransferError
from penstock.transfer import StorageConfig

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
