"""The conformance suite of transports between two agents. Subclass it and make a harness.

    class TestShm(PeerTransportSuite):
        @staticmethod
        def harness(size_bytes: int) -> TwoAgents:
            return TwoAgents(lambda: [ShmTransport(...)], size_bytes=size_bytes)

A region without a grant cannot be reached, and a lost peer is an error.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import pytest

from penstock.core.errors import PeerLost, TransferError, TransferRefused
from penstock.testing.loop import run_async
from penstock.testing.transports.harness import TwoAgents, differ, fill
from penstock.testing.transports.transport import READ, WRITE, TransportSuite
from penstock.transfer import Access, RemoteRegion, TransferOp


class PeerTransportSuite(TransportSuite):
    """Tests of a transport between two agents."""

    @staticmethod
    def harness(size_bytes: int) -> TwoAgents:
        """Make the transport's harness, with `size_bytes` of memory on each side."""
        raise NotImplementedError

    def run_two(
        self, scenario: Callable[[TwoAgents], Awaitable[None]], size_bytes: int | None = None
    ) -> None:
        async def main() -> None:
            async with self.harness(size_bytes or self.size_bytes) as harness:
                await scenario(harness)

        run_async(main())

    def test_a_notification_comes_after_all_bytes(self) -> None:
        async def scenario(harness: TwoAgents) -> None:
            here, _ = await fill(harness, seed=10)
            notified = harness.owner.notifications()
            whole = harness.local.ranges(), harness.remote.ranges()
            harness.agent.post(WRITE, *whole, harness.peer, notify=b"written")
            assert await anext(notified) == ("reader", b"written")
            assert np.array_equal(await harness.read_remote(), here)
            harness.agent.send_notification(harness.peer, b"alone")
            assert await anext(notified) == ("reader", b"alone")
            answers = harness.agent.notifications()
            harness.owner.send_notification("reader", b"answer")
            assert await anext(answers) == ("owner", b"answer")

        self.run_two(scenario)

    @pytest.mark.parametrize("op", [READ, WRITE])
    def test_a_grant_for_one_direction_does_not_allow_the_other(self, op: TransferOp) -> None:
        async def scenario(harness: TwoAgents) -> None:
            other = WRITE if op is READ else READ
            for register, give in ((Access(op.value), None), (None, Access(op.value))):
                memory, registered = harness.make_memory()
                memory[:] = 7
                given = harness.owner.register(registered, "given", access=register)
                peer = await harness.agent.connect(harness.owner.metadata([given], access=give))
                region = peer.region("given")
                await harness.agent.post(op, harness.local.ranges(0, 8), region.ranges(8, 8), peer).wait()
                ranges = harness.local.ranges(0, 64), region.ranges(0, 64)
                with pytest.raises(TransferRefused, match="only; its owner has to register it"):
                    harness.agent.post(other, *ranges, peer)
                before, here = memory.copy(), harness.read_local()
                shown = region.info.key(op)  # what a peer would do that does not check itself
                peer.infos[region.region_id] = msgspec.structs.replace(
                    region.info, read_key=shown, write_key=shown
                )
                refused = sum(harness.owner.counters.refused.values())
                with pytest.raises(TransferRefused):
                    await harness.agent.post(other, *ranges, peer).wait()
                assert np.array_equal(memory, before)
                assert np.array_equal(harness.read_local(), here)
                assert sum(harness.owner.counters.refused.values()) == refused + 1

        self.run_two(scenario)

    @pytest.mark.parametrize("op", [READ, WRITE])
    def test_a_region_without_a_grant_cannot_be_reached(self, op: TransferOp) -> None:
        async def scenario(harness: TwoAgents) -> None:
            secret, memory = harness.make_memory()
            hidden = harness.owner.register(memory, "hidden")
            with pytest.raises(TransferRefused, match="no region named"):
                harness.peer.region("hidden")
            with pytest.raises(TransferRefused, match="was not given"):
                harness.agent.post(op, harness.local.ranges(0, 8), hidden.ranges(0, 8), harness.peer)
            forged = msgspec.structs.replace(hidden.info, read_key=bytes(8), write_key=bytes(8))
            harness.peer.infos[hidden.region_id] = forged  # what a peer would do that does not check itself
            guess = RemoteRegion(hidden.region_id, forged)
            harness.write_local(np.full(self.size_bytes, 7, np.uint8))
            for length in (8, self.size_bytes):
                with pytest.raises(TransferError):
                    await harness.agent.post(
                        op, harness.local.ranges(0, length), guess.ranges(0, length), harness.peer
                    ).wait()
            assert not secret.any()
            assert (harness.read_local() == 7).all()
            assert harness.owner.counters.refused.get("transfer_refused", 0) >= 1
            assert harness.owner.refusals

        self.run_two(scenario)

    @pytest.mark.parametrize("op", [READ, WRITE])
    def test_a_deregistered_region_cannot_be_reached(self, op: TransferOp) -> None:
        async def scenario(harness: TwoAgents) -> None:
            await differ(harness)
            whole = harness.local.ranges(), harness.remote.ranges()
            prepared = harness.agent.prepare(*whole, harness.peer)
            with harness.endless_transfers():
                handle = prepared.post(op)
                await asyncio.sleep(0)
                await harness.owner.deregister(harness.owned)
                with pytest.raises(TransferRefused, match=r"deregistered|not registered"):
                    await handle.wait()
            here, there = harness.read_local(), await harness.read_remote()
            with pytest.raises(TransferRefused):
                prepared.post(op)
            await asyncio.sleep(0.05)
            assert np.array_equal(harness.read_local(), here), "bytes arrived after the end"
            assert np.array_equal(await harness.read_remote(), there), "bytes arrived after the end"

        self.run_two(scenario, self.large_bytes)

    @pytest.mark.parametrize("op", [READ, WRITE])
    def test_a_closed_peer_fails_transfers_soon(self, op: TransferOp) -> None:
        async def scenario(harness: TwoAgents) -> None:
            whole = harness.local.ranges(), harness.remote.ranges()
            with harness.endless_transfers():
                handle = harness.agent.post(op, *whole, harness.peer)
                await asyncio.sleep(0)
                await harness.owner.close()
                with pytest.raises((PeerLost, TransferRefused)):
                    await handle.wait()
            with pytest.raises(PeerLost):
                harness.agent.post(op, *whole, harness.peer)

        self.run_two(scenario, self.large_bytes)

    def test_disconnected_peers_can_reconnect(self) -> None:
        async def scenario(harness: TwoAgents) -> None:
            here, _ = await fill(harness, seed=11)
            await harness.agent.disconnect(harness.peer)
            with pytest.raises(PeerLost, match="connect"):
                harness.agent.post(WRITE, harness.local.ranges(), harness.remote.ranges(), harness.peer)
            again = await harness.agent.connect(harness.owner.metadata())
            remote = again.region("there")
            await harness.agent.post(WRITE, harness.local.ranges(), remote.ranges(), again).wait()
            assert np.array_equal(await harness.read_remote(), here)

        self.run_two(scenario)

    def test_more_regions_can_be_granted_later(self) -> None:
        async def scenario(harness: TwoAgents) -> None:
            view, memory = harness.make_memory()
            more = harness.owner.register(memory, "more")
            peer = await harness.agent.connect(harness.owner.metadata([more]))
            assert peer is harness.peer
            assert set(peer.regions) == {"there", "more"}
            here, _ = await fill(harness, seed=12)
            await harness.agent.post(WRITE, harness.local.ranges(), peer.region("more").ranges(), peer).wait()
            assert np.array_equal(view, here)

        self.run_two(scenario)
