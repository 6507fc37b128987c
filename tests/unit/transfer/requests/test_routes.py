"""Which transport a transfer takes: the one that is expected to be quickest, of those that work."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from penstock.core.descriptors import TransferCost
from penstock.core.errors import DeadlineExceeded, TransferError, TransferRefused
from penstock.transfer import TransferAgent, TransferConfig, TransferOp
from penstock.transfer.requests.routes import Route, choose
from penstock.transfer.transports.memory import MemoryTransport

pytestmark = pytest.mark.virtual
READ = TransferOp.READ
CONFIG = TransferConfig(listen=("memory",), timeout_s=8.0)


class FakeChannel:
    def __init__(self, start_s):
        self.start_s = start_s
        self.fault = None
        self.hangs = False
        self.runs = 0

    def refusal(self, op, local, remote):
        return None

    def cost(self, op):
        return TransferCost(start_s=self.start_s, range_s=0, bytes_per_s=1e12)

    def prepare(self, op, pairs, *, checksum):
        return self

    def run_now(self):
        return False

    async def run(self):
        self.runs += 1
        if self.hangs:
            await asyncio.sleep(1e6)
        if self.fault:
            raise self.fault

    async def close(self): ...


class FakeTransport(MemoryTransport):
    def __init__(self, name, start_s):
        super().__init__(threads=1, inline_bytes_max=0)
        self.name = name
        self.channel = FakeChannel(start_s)
        self.users = []

    async def connect(self, link, contact, regions):
        return self.channel

    def lingering(self, user):
        return self.users


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
        quick.channel.hangs = True
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await prepared.post(READ).wait()
        assert loop.time() - began_s == pytest.approx(4.0), "half of the deadline"
        slow.channel.hangs = True
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


async def test_the_last_error_is_raised_when_all_have_failed():
    async with _play() as (agent, prepared, quick, slow):
        quick.channel.fault, slow.channel.fault = TransferError("broken"), TransferError("broken too")
        handle = prepared.post(READ)
        with pytest.raises(TransferError, match="broken too"):
            await handle.wait()
        assert agent.counters.failed_transfers == {"slow": 1}
        quick.channel.fault = None
        await prepared.post(READ).wait()  # both rest: the one that rests least


def routes():
    return [
        Route(name, FakeChannel(s), FakeTransport(name, s)) for name, s in (("quick", 1e-3), ("slow", 10e-3))
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
