"""LMCache as a peer, in a process of its own."""

import asyncio
import contextlib
import json
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError

DRIVER = Path(__file__).resolve().parents[1] / "peers" / "lmcache_stores.py"
_ANSWER_S = 120


class LmcachePeer:
    """LMCache's CPU backend, and its disk backend with O_DIRECT and without."""

    def __init__(self, driver: asyncio.subprocess.Process) -> None:
        """Take a driver that is ready."""
        self._driver = driver

    @classmethod
    async def start(
        cls, stack: AsyncExitStack, python: Path, directory: Path, *, block_bytes: int, count: int
    ) -> "LmcachePeer":
        """Start it; the stack ends it.

        Raises:
            ConfigError: LMCache is not installed there, or it fails.
        """
        if not os.access(python, os.X_OK):
            raise ConfigError(f"{python}: there is no such Python; it needs lmcache 0.5.6 and torch")
        driver = await asyncio.create_subprocess_exec(
            str(python), str(DRIVER), str(directory), str(block_bytes), str(count),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

        async def end() -> None:
            if driver.returncode is None:
                driver.kill()
            await driver.wait()

        stack.push_async_callback(end)
        peer = cls(driver)
        await peer._line()
        return peer

    async def host(self, seed: int) -> dict[str, float]:
        """Store blocks in memory and load them."""
        return await self._ask({"op": "host", "seed": seed})

    async def disk_direct(self, seed: int) -> dict[str, float]:
        """Store blocks in files and load them, with O_DIRECT."""
        return await self._ask({"op": "disk", "direct": True, "seed": seed})

    async def disk_buffered(self, seed: int) -> dict[str, float]:
        """Store blocks in files by the page cache, its default, and load them after they were dropped from it."""
        return await self._ask({"op": "disk", "direct": False, "seed": seed})

    async def _ask(self, question: dict[str, Any]) -> dict[str, float]:
        assert self._driver.stdin
        self._driver.stdin.write(json.dumps(question).encode() + b"\n")
        return await self._line()

    async def _line(self) -> dict[str, float]:
        assert self._driver.stdout
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                line = await self._driver.stdout.readline()
        if not line:
            raise ConfigError(
                f"{DRIVER.name} ended, or gave no answer in {_ANSWER_S} s; run it by hand: {DRIVER} DIRECTORY 262144 64"
            )
        answer: dict[str, float] = json.loads(line)
        return answer
