"""Which transport a transfer takes: the one that is expected to be quickest, of those that work."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from penstock.core.descriptors import Descriptors, TransferCost
from penstock.core.errors import DeadlineExceeded, TransferCancelled, TransferError, TransferRefused
from penstock.transfer import TransferAgent, TransferConfig, TransferOp
from penstock.transfer.requests.handles import Telemetry, TransferHandle
from penstock.transfer.requests.routes import Route, choose
from penstock.transfer.transports.memory import MemoryTransport
from tests.support.fake_transport import FakeTransport

pytestmark = pytest.mark.virtual
READ = TransferOp.READ
CONFIG = TransferConfig(listen=("memory",), timeout_s=8.0)


@asynccontextmanager
async def _play():
    quick, slow = FakeTransport("quick", 1e-3), FakeTransport("slow", 10.0)
    owners = [FakeTransport("quick", 1e-3), FakeTransport("slow", 10.0)]
    async with (
        TransferAgent("a", CONFIG, transports=[quick, slow]) as agent,
        TransferAgent("b", CONFIG, transports=owners) as owner,
    ):
        owner.register(np.zeros(8, np.uint8), "kv")
        here, peer = agent.register(np.zeros(8, np.uint8)), await agent.connect(owner.metadata())
        prepared = agent.prepare(here.ranges(), peer.region("kv").ranges(), peer)
        yield agent, prepared, quick, slow


async def test_another_transport_takes_over_from_one_that_fails_and_it_rests():
    async with _play() as (agent, prepared, quick, slow):
        quick.channel.fault = TransferError("broken")
        for _ in range(30):
            handle = prepared.post(READ)
            await handle.wait()
            assert handle.telemetry.backend == "slow"
        assert (quick.channel.runs, slow.channel.runs) == (1, 30)
        assert agent.counters.failed_over_transfers == {"quick": 1}
        assert agent.counters.failed_transfers == {}
        quick.channel.fault = None
        await asyncio.sleep(2)
        handle = prepared.post(READ)
        await handle.wait()
        assert handle.telemetry.backend == "quick"


async def test_a_transport_that_hangs_leaves_time_for_another_one():
    async with _play() as (_agent, prepared, quick, slow):
        quick.channel.free.clear()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await prepared.post(READ).wait()
        assert loop.time() - began_s == pytest.approx(4.0), "half of the deadline"
        slow.channel.free.clear()
        began_s = loop.time()
        with pytest.raises(DeadlineExceeded, match="within 2 s"):
            await prepared.post(READ, timeout_s=2).wait()
        assert loop.time() - began_s == pytest.approx(2.0)


@pytest.mark.parametrize("fault", [TransferRefused("never"), None])
async def test_what_no_other_transport_would_do_better_is_final(fault):
    async with _play() as (agent, prepared, quick, slow):
        quick.channel.fault = fault or TransferError("its own end")
        if fault is None:  # NIXL may still write where another one would
            quick.users = [asyncio.get_running_loop().create_future()]
        with pytest.raises(TransferError, match=r"never|its own end"):
            await prepared.post(READ).wait()
        assert slow.channel.runs == 0
        assert agent.counters.failed_over_transfers == {}
        quick.users = []


def routes():
    return [
        Route(name, FakeTransport(name, s).channel, FakeTransport(name, s))
        for name, s in (("quick", 1e-3), ("slow", 10e-3))
    ]


def learn(route, took_s, now_s):
    route.speeds.learn(READ, route.channel.cost(READ), 8, 1, took_s=took_s, now_s=now_s)


def names(several, count, now_s, took_s):
    """Post so many, and learn what each of them takes."""
    chosen = []
    for _ in range(count):
        route, _ = choose(several, READ, 8, 1, now_s)
        learn(route, took_s[route.name], now_s)
        chosen.append(route.name)
    return chosen


def test_a_slow_moment_does_not_last():
    both = routes()
    slow_s, usual_s = {"quick": 0.5, "slow": 10e-3}, {"quick": 1e-3, "slow": 10e-3}
    assert names(both, 60, 100.0, slow_s)[-1] == "slow"
    after = names(both, 2000, 100.0, usual_s)
    assert after.index("quick") < 80, "it is tried now and then"
    assert after[200:].count("slow") == 0


def test_slowness_is_forgotten_with_time():
    both = routes()
    names(both, 40, 100.0, {"quick": 0.5, "slow": 10e-3})
    assert choose(both, READ, 8, 1, 100.0)[0].name == "slow"
    assert choose(both, READ, 8, 1, 130.0)[0].name == "quick"


class Priced(MemoryTransport):
    """One that says of itself what a test wants, and counts its moves."""

    def __init__(self, name: str, cost: TransferCost) -> None:
        super().__init__(threads=1, inline_bytes_max=1 << 16)
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
        there, here = a.register(bytearray(1 << 16)), b.register(bytearray(1 << 16))
        peer = await b.connect(a.metadata())
        for route in peer.routes.values():
            route.speeds.learn = lambda *_, **__: None
        used = []
        for _ in range(50):
            estimate_s = b.estimate(READ, 1024, 1, peer)
            transfer = b.post(
                READ,
                Descriptors.of(here.region_id, 0, 1024),
                Descriptors.of(there.region_id, 0, 1024),
                peer,
            )
            await transfer.complete()
            used.append(transfer.telemetry.backend)
            assert estimate_s == pytest.approx(transfer.telemetry.expected_s[used[-1]])
        assert used == ["slow"] * before_it + ["quick"] * (50 - before_it)


async def test_who_is_cancelled_twice_still_waits_until_memory_is_free():
    handle = TransferHandle(Telemetry(num_bytes=1, ranges=1, backend="memory"))
    asked = []
    handle.cancels_by(lambda: asked.append("cancel"))
    task = asyncio.ensure_future(handle.complete())
    for _ in range(3):
        await asyncio.sleep(0.1)
        task.cancel()
    await asyncio.sleep(0.1)
    assert asked == ["cancel"]
    assert not task.done(), "its bytes may still arrive"
    handle.finish(TransferCancelled("it has ended"))
    with pytest.raises(asyncio.CancelledError):
        await task
