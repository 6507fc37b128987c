"""A transport that has to be set up first is charged for it, until transfers have lost as much by doing without."""

import pytest

from penstock.core.descriptors import Descriptors, TransferCost, TransferOp
from penstock.transfer import TransferAgent
from penstock.transfer.transports.memory import MemoryTransport

KIB = 1024
READ = TransferOp.READ


class Priced(MemoryTransport):
    """One that says of itself what a test wants, and counts its moves."""

    def __init__(self, name: str, cost: TransferCost) -> None:
        super().__init__(threads=1, inline_bytes_max=64 * KIB)
        self.name = name
        self._cost = cost

    async def connect(self, link, contact, regions):
        channel = await super().connect(link, contact, regions)
        channel.cost = lambda op: self._cost
        return channel


@pytest.mark.parametrize(("setup_s", "before_it"), [(0.0, 0), (0.03, 3), (1e9, 50)])
async def test_a_way_is_set_up_once_others_have_lost_as_much(setup_s, before_it):
    """The quick one saves 10 ms a transfer."""
    slow = TransferCost(start_s=0.02, range_s=0, bytes_per_s=1e12)
    quick = TransferCost(start_s=0.01, range_s=0, bytes_per_s=1e12, setup_s=setup_s)

    made = {name: [Priced("slow", slow), Priced("quick", quick)] for name in ("a", "b")}
    async with (
        TransferAgent("a", transports=made["a"]) as a,
        TransferAgent("b", transports=made["b"]) as b,
    ):
        there, here = a.register(bytearray(64 * KIB)), b.register(bytearray(64 * KIB))
        peer = await b.connect(a.metadata())
        for route in peer.routes.values():
            route.speeds.learn = lambda *_, **__: None
        used = []
        for _ in range(50):
            estimate_s = b.estimate(READ, KIB, 1, peer)
            transfer = b.post(
                READ,
                Descriptors.of(here.region_id, 0, KIB),
                Descriptors.of(there.region_id, 0, KIB),
                peer,
            )
            await transfer.complete()
            used.append(transfer.telemetry.backend)
            assert estimate_s == pytest.approx(transfer.telemetry.expected_s[used[-1]])
        assert used == ["slow"] * before_it + ["quick"] * (50 - before_it)
