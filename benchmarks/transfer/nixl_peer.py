"""NVIDIA's NIXL as a peer, in its own processes, which are stopped while others are measured because some spin."""

import asyncio
import json
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks.transfer.shapes import POOL_BYTES, SEED, Shape
from penstock.core.descriptors import TransferOp
from penstock.core.errors import ConfigError

DRIVER = Path(__file__).resolve().parents[1] / "peers" / "nixl_transfer.py"
VARIANTS = {"polled": "polled", "progress_0us": "0", "progress_500us": "500"}
"""No progress thread, or its delay. The figure is the best one's."""
_ENVIRONMENTS = {"nixl": {}, "nixl_tcp": {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}}
_ANSWER_S = 120


class NixlPeer:
    """One variant of one of `nixl` and `nixl_tcp`."""

    def __init__(self, name: str, driver: asyncio.subprocess.Process) -> None:
        """Take a driver that is ready and stopped."""
        self.name = name
        self._driver = driver

    @classmethod
    async def start(cls, stack: AsyncExitStack, python: Path, kind: str, variant: str) -> "NixlPeer":
        """Start both of its processes.

        Raises:
            ConfigError: they fail.
        """
        driver = await asyncio.create_subprocess_exec(
            str(python), str(DRIVER), str(POOL_BYTES), VARIANTS[variant],
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"NIXL_LOG_LEVEL": "ERROR"} | _ENVIRONMENTS[kind], start_new_session=True,
        )  # fmt: skip
        peer = cls(f"{kind}_{variant}", driver)
        stack.push_async_callback(peer._end)
        await peer._line()
        peer._signal(signal.SIGSTOP)
        return peer

    async def move(self, op: TransferOp, shape: Shape, repeats: int) -> list[float]:
        seconds: list[float] = (
            await self._ask(
                {
                    "op": op.value,
                    "count": shape.count,
                    "bytes": shape.size_bytes,
                    "seed": SEED,
                    "reps": repeats,
                }
            )
        )["seconds"]
        return seconds

    async def idle_share(self, seconds: float) -> float | None:
        share: float = (await self._ask({"op": "idle", "seconds": seconds}))["share"]
        return share

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._driver.stdin
        self._signal(signal.SIGCONT)
        self._driver.stdin.write(json.dumps(question).encode() + b"\n")
        answer = await self._line()
        self._signal(signal.SIGSTOP)
        return answer

    async def _line(self) -> dict[str, Any]:
        assert self._driver.stdout
        assert self._driver.stderr
        async with asyncio.timeout(_ANSWER_S):
            line = await self._driver.stdout.readline()
        if not line:
            text = (await self._driver.stderr.read()).decode(errors="replace").strip()
            raise ConfigError(f"{self.name}: {DRIVER.name} ended: {text[-500:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._driver.pid, number)

    async def _end(self) -> None:
        if self._driver.returncode is None:
            self._signal(signal.SIGKILL)
        await self._driver.wait()
