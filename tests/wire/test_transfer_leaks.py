"""Peers come and go for ever: nothing of them stays."""

import asyncio
import gc
import threading
from pathlib import Path

import numpy as np

from penstock.transfer import Arena, TransferAgent, TransferConfig, TransferOp
from tests.support.until import until

CONFIG = TransferConfig(listen=("unix",), transports=("shm", "tcp"))
TIMES = 60
FEW = 4
"""More than this at the end grows with the peers: threads and sockets of others begin and end at any time."""


def _held() -> tuple[int, int, int]:
    gc.collect()
    threads = [
        one for one in threading.enumerate() if not one.name.startswith("asyncio_")
    ]  # the loop's own few
    return len(list(Path("/proc/self/fd").iterdir())), len(threads), len(asyncio.all_tasks())


async def _until_as_before(before: tuple[int, int, int], *agents: TransferAgent) -> None:
    """The other side of a socket hears a little later."""
    await until(
        lambda: (
            all(now <= then + FEW for now, then in zip(_held(), before, strict=True))
            and not any(agent._connections._links for agent in agents)
        )
    )


async def test_peers_that_connect_and_disconnect_leave_nothing():
    with Arena.create(1 << 20) as arena:
        async with TransferAgent("owner", CONFIG) as owner, TransferAgent("reader", CONFIG) as reader:
            owner.register(arena, "kv")
            here = reader.register(np.zeros(1 << 20, np.uint8))
            before = (0, 0, 0)
            for number in range(TIMES):
                if number == 2:  # threads that stay have begun
                    await asyncio.sleep(0.05)
                    before = _held()
                peer = await reader.connect(owner.metadata())
                ranges = here.ranges(), peer.region("kv").ranges()
                await reader.post(TransferOp.READ, *ranges, peer).wait()
                await reader.disconnect(peer)
            await _until_as_before(before, owner, reader)


async def test_agents_that_restart_leave_nothing():
    async with TransferAgent("reader", CONFIG) as reader:
        here = reader.register(np.zeros(64, np.uint8))
        before = (0, 0, 0)
        for number in range(TIMES // 3):
            if number == 2:
                await asyncio.sleep(0.05)
                before = _held()
            async with TransferAgent(f"owner {number}", CONFIG) as owner:
                owner.register(np.ones(64, np.uint8), "kv")
                peer = await reader.connect(owner.metadata())
                await reader.post(TransferOp.READ, here.ranges(), peer.region("kv").ranges(), peer).wait()
        await _until_as_before(before, reader)
        assert not reader.peers
