"""NIXL over TCP between two processes whose link ends again and again: nothing is left of it on either side."""

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.transfer import TransferAgent, TransferConfig, TransferOp

pytestmark = pytest.mark.slow
LINKS = 4


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def test_links_that_end_leave_no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    config = TransferConfig(listen=("unix",), transports=("nixl",))
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).parents[1] / "helpers" / "transfer_owner.py"),
        config.model_dump_json(),
        "4096",
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    try:
        metadata = bytes.fromhex((await child.stdout.readline()).decode())
        async with TransferAgent("reader", config) as agent:
            here = agent.register(np.zeros(4096, np.uint8))
            counts = []
            for _ in range(LINKS):
                peer = await agent.connect(metadata)
                ranges = here.ranges(), peer.region("shared").ranges()
                await agent.post(TransferOp.READ, *ranges, peer).wait()
                counts.append(np.array([_descriptors(os.getpid()), _descriptors(child.pid)]))
                await agent.disconnect(peer)
            assert (counts[-1] <= counts[0] + 1).all(), f"{counts}"
    finally:
        child.kill()
        await child.wait()
