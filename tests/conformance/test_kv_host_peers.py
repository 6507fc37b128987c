"""The suite of KV sources, for blocks in the memory of another host: its worker lends them, its siblings' too."""

import asyncio
from unittest import mock

from penstock.core.errors import PeerLost, PinExpired
from penstock.core.ids import BlockId
from penstock.testing.kv_source import FlippedBitSuite, chain, load_into, random_blocks
from penstock.transfer import TransferConfig
from penstock.transfer.regions import copies
from penstock.transfer.regions.checksum import copy_summed
from penstock.transfer.regions.ranges import copy_ranges
from penstock.transfer.tcp_config import TcpConfig
from penstock.transfer.transports.memory import MemoryTransport
from penstock.transfer.transports.tcp.stream import DataStream
from penstock.transfer.transports.tcp.transport import TcpTransport
from penstock.worker.kv_transfer.reader import LentMismatch
from tests.support.flipped import flip
from tests.support.peer_stage import HostPeerStage, peer_stage


def _copied_with_a_flipped_bit(targets, *about):
    copy_ranges(targets, *about)
    flip(targets[-1])


def _summed_with_a_flipped_bit(targets, sources, lengths, threads, stop):
    sums = copy_summed(targets, sources, lengths, threads, stop)
    flip(targets[-1])  # after the transport has compared: only the stored checksum can tell
    return sums


class TestMemoryHostPeer(FlippedBitSuite):
    def source_stage(self):
        return peer_stage(
            lambda: [MemoryTransport(threads=1, inline_bytes_max=64 << 10)],
            TransferConfig(listen=("memory",)),
            HostPeerStage,
        )

    def flipped(self):
        return mock.patch.multiple(
            copies, copy_summed=_summed_with_a_flipped_bit, copy_ranges=_copied_with_a_flipped_bit
        )


class TestTcpHostPeer(FlippedBitSuite):
    def source_stage(self):
        return peer_stage(
            lambda: [TcpTransport(TcpConfig(), inline_bytes_max=0, idle_s=2.0)],
            TransferConfig(listen=("tcp://127.0.0.1:0",)),
            HostPeerStage,
        )

    def flipped(self):
        original = DataStream._receive_into

        def receive(self, batch, addresses, lengths):
            original(self, batch, addresses, lengths)
            if int(addresses[0]) == int(batch.addresses[0]):
                flip(addresses[0])

        return mock.patch.object(DataStream, "_receive_into", receive)


def on_tcp(scenario):
    TestTcpHostPeer().on_source(scenario)


async def ended(tier, loan, wrong=()):
    """End a loan, and wait until accused blocks were checked."""
    loan.end(wrong)
    await asyncio.get_running_loop().run_in_executor(tier._load_thread, lambda: None)
    await asyncio.sleep(0)


def test_a_bit_that_flipped_in_the_arena_is_found_by_the_reader_and_dropped_by_the_owner():
    async def scenario(stage):
        hashes = chain(1, 8)
        await stage.put(hashes, random_blocks(8, 1))
        (slot,) = stage.tier._pool.match(hashes[2:3])
        flip(stage.tier._extent.addresses([slot])[0])
        assert await load_into(stage.source, hashes, range(40, 48)) == 0
        assert isinstance(stage.source.error, LentMismatch)
        assert (stage.source.wrong, stage.source.num_corrupt) == ([1], 1), "the first is on the device"
        loan, stage.loan = stage.loan, None
        await ended(stage.tier, loan, stage.source.wrong)
        assert (stage.tier.num_corrupt, stage.tier.locate(hashes)) == (1, 2)

    on_tcp(scenario)


def test_a_reader_that_accuses_blocks_wrongly_costs_the_owner_nothing():
    async def scenario(stage):
        hashes = chain(1, 8)
        await stage.put(hashes, random_blocks(8, 1))
        loan, stage.loan = stage.loan, None
        await ended(stage.tier, loan, [0, 1, 2, 2, 6, 7, 4_000_000_000])
        assert (stage.tier.num_corrupt, stage.tier.locate(hashes)) == (0, 8)
        assert stage.tier._pool.num_available == stage.tier.num_blocks

    on_tcp(scenario)


def test_blocks_of_a_sibling_that_it_overwrites_meanwhile_are_only_missing():
    async def scenario(stage):
        hashes = chain(1, 8)
        await stage.put(hashes, random_blocks(8, 1))
        slots = stage.sibling._pool.match(hashes[4:])
        stage.sibling._extent.clear(slots[:1])
        assert await load_into(stage.source, hashes, range(40, 48)) == 0
        assert isinstance(stage.source.error, PinExpired)
        assert (stage.source.num_corrupt, stage.source.wrong) == (0, [])

    on_tcp(scenario)


def test_what_is_lent_is_not_evicted_until_it_comes_back():
    async def scenario(stage):
        hashes = chain(1, 8)
        await stage.put(hashes, random_blocks(8, 1))
        held = stage.tier._pool.match(hashes[1:4])
        assert len(held) == 3
        for seed in range(2, 6):
            await stage._offload(stage.tier, chain(seed, 16))
        assert stage.tier._pool.match(hashes[1:4]) == held
        assert await load_into(stage.source, hashes, range(40, 48)) == 8
        loan, stage.loan = stage.loan, None
        loan.end()
        for seed in range(6, 10):
            await stage._offload(stage.tier, chain(seed, 16))
        assert not stage.tier._pool.match(hashes[1:4])

    on_tcp(scenario)


def test_an_owner_that_is_lost_in_the_middle_brings_nothing():
    async def scenario(stage):
        hashes = chain(1, 8)
        await stage.put(hashes, random_blocks(8, 1))
        stage.source.origin.peer.link.close("cut")
        assert await load_into(stage.source, hashes, range(40, 48)) == 0
        assert isinstance(stage.source.error, PeerLost)

    on_tcp(scenario)


def test_an_owner_that_hangs_is_waited_for_until_the_load_is_cancelled():
    async def scenario(stage):
        hashes = chain(1, 8)
        await stage.put(hashes, random_blocks(8, 1))
        stage.is_hung = True
        done = asyncio.get_running_loop().create_future()
        load = stage.source.load(hashes, [BlockId(n) for n in range(40, 48)], done.set_result)
        await asyncio.sleep(0.3)
        assert not done.done()
        load.cancel()
        assert await done == 0

    on_tcp(scenario)


def test_a_loan_of_blocks_that_the_host_lacks_is_none():
    async def scenario(stage):
        await stage.put(chain(1, 8), random_blocks(8, 1))
        assert stage.tier.lend(chain(2, 8)) is None
        assert stage.tier.lend(chain(1, 8)[:0]) is None

    on_tcp(scenario)
