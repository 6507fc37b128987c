"""Transport `tcp` on uvloop, whose sockets and watchers are its own."""

import asyncio

import numpy as np
import pytest
import uvloop

from penstock.core.errors import PeerLost, TransferCancelled
from penstock.transfer import TransferAgent, TransferConfig, TransferOp

SIZE = 8 << 20


@pytest.mark.parametrize("listen", ["unix", pytest.param("tcp://127.0.0.1:0", marks=pytest.mark.nightly)])
def test_everything_works_on_uvloop(listen):
    config = TransferConfig(listen=(listen,), transports=("tcp",))

    async def main():
        async with TransferAgent("a", config) as agent, TransferAgent("b", config) as other:
            here, there = np.random.default_rng(1).integers(0, 256, (2, SIZE), np.uint8)
            local = agent.register(here)
            other.register(there, "there")
            peer = await agent.connect(other.metadata())
            remote = peer.region("there")
            for size in (100, 64 << 10, SIZE):
                for op in TransferOp:
                    before = here.copy(), there.copy()
                    await agent.post(op, local.ranges(0, size), remote.ranges(0, size), peer).wait()
                    assert np.array_equal(here[:size], there[:size])
                    here[:], there[:] = before
            handle = agent.post(TransferOp.WRITE, local.ranges(), remote.ranges(), peer)
            await asyncio.sleep(0)
            handle.cancel()
            with pytest.raises(TransferCancelled):
                await handle.wait()
            await agent.post(TransferOp.WRITE, local.ranges(), remote.ranges(), peer, notify=b"x").wait()
            assert np.array_equal(here, there)
            assert await anext(other.notifications()) == ("a", b"x")
            handle = agent.post(TransferOp.READ, local.ranges(), remote.ranges(), peer)
            await asyncio.sleep(0)
            await other.close()
            with pytest.raises(PeerLost):
                await handle.wait()

    uvloop.run(main())
