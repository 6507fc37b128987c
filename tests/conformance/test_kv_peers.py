"""The suite of KV sources, for blocks of another worker, over each transport."""

import asyncio
from unittest import mock

import pytest

from penstock.core.errors import ChecksumMismatch, PeerLost, PinExpired
from penstock.core.hashing import block_hashes
from penstock.core.ids import BlockId
from penstock.testing.kv_source import FlippedBitSuite, chain, load_into, random_blocks
from penstock.transfer import TransferConfig
from penstock.transfer.config import TcpConfig
from penstock.transfer.regions import copies
from penstock.transfer.regions.ranges import checksum_ranges, copy_summed
from penstock.transfer.transports.memory import MemoryTransport
from penstock.transfer.transports.shm import ShmTransport
from penstock.transfer.transports.tcp.stream import DataStream
from penstock.transfer.transports.tcp.transport import TcpTransport
from tests.support.flipped import flip
from tests.support.peer_stage import peer_stage


def _copy_with_a_flipped_bit(targets, sources, lengths, threads, stop):
    copy_summed(targets, sources, lengths, threads, stop)
    flip(targets[0])
    return checksum_ranges(targets, lengths)


class TestShmPeer(FlippedBitSuite):
    def source_stage(self):
        return peer_stage(
            lambda: [ShmTransport(threads=2, inline_bytes_max=64 << 10)], TransferConfig(listen=("unix",))
        )

    def flipped(self):
        return mock.patch.object(copies, "copy_summed", _copy_with_a_flipped_bit)


class TestMemoryPeer(FlippedBitSuite):
    def source_stage(self):
        return peer_stage(
            lambda: [MemoryTransport(threads=1, inline_bytes_max=64 << 10)],
            TransferConfig(listen=("memory",)),
        )

    def flipped(self):
        return mock.patch.object(copies, "copy_summed", _copy_with_a_flipped_bit)


class TestTcpPeer(FlippedBitSuite):
    def source_stage(self):
        return peer_stage(
            lambda: [TcpTransport(TcpConfig(), inline_bytes_max=0, idle_s=2.0)],
            TransferConfig(listen=("tcp://127.0.0.1:0",)),
        )

    def flipped(self):
        original = DataStream._receive_into

        def receive(self, batch, addresses, lengths):
            original(self, batch, addresses, lengths)
            if int(addresses[0]) == int(batch.addresses[0]):
                flip(addresses[0])

        return mock.patch.object(DataStream, "_receive_into", receive)


async def test_a_peer_that_failed_has_no_blocks_any_more_and_says_why():
    async with TestShmPeer().source_stage() as stage:
        hashes = chain(1, 8)
        await stage.put(hashes, random_blocks(8, 1))
        stage.is_pinned = False
        assert await load_into(stage.source, hashes, range(40, 48)) == 0
        assert isinstance(stage.source.error, PinExpired)
        assert (stage.source.is_off, stage.source.locate(hashes), stage.source.num_corrupt) == (True, 0, 0)


async def test_what_differs_is_a_mismatch():
    async with TestShmPeer().source_stage() as stage:
        hashes = chain(1, 8)
        await stage.put(hashes, random_blocks(8, 1))
        with TestShmPeer().flipped():
            assert await load_into(stage.source, hashes, range(40, 48)) == 0
        assert isinstance(stage.source.error, ChecksumMismatch)
        assert stage.source.num_loaded == 0


async def test_a_peer_whose_link_ends_in_the_middle_brings_nothing():
    async with TestShmPeer().source_stage() as stage:
        hashes = chain(1, 8)
        await stage.put(hashes, random_blocks(8, 1))
        stage.source.origin.peer.link.close("cut")
        assert await load_into(stage.source, hashes, range(40, 48)) == 0
        assert isinstance(stage.source.error, PeerLost)


async def test_the_partial_block_has_a_name_of_its_own_and_is_not_counted():
    async with TestShmPeer().source_stage() as stage:
        hashes, content = chain(1, 3), random_blocks(4, 1)
        await stage.put(hashes, content[:3])
        assert stage.source.locate(stage.source.tail_hash) == 0
        stage._owner.memory[20] = content[3]
        stage.source.growth.tail = stage.source.growth.block_ids[:1] - 3 + 20
        names = stage.source.names
        assert stage.source.locate(names) == 4
        assert await load_into(stage.source, names[1:], [50, 51, 52]) == 3
        assert (stage.memory[[50, 51, 52]] == content[1:]).all()
        assert stage.source.num_loaded == 2


async def test_a_prompt_whose_blocks_are_not_named_yet_has_none():
    async with TestShmPeer().source_stage() as stage:
        await asyncio.sleep(0)
        assert stage.source.locate(block_hashes(range(16), 4)) == 0


@pytest.mark.parametrize("suite", [TestShmPeer, TestTcpPeer])
async def test_without_checksums_a_flipped_bit_would_pass(suite):
    """The flip reaches the target, so that the other tests mean something."""
    async with suite().source_stage() as stage:
        stage.reader._checksum = False
        hashes, content = chain(1, 8), random_blocks(8, 1)
        await stage.put(hashes, content)
        with suite().flipped(), mock.patch.object(copies, "copy_ranges", _copy_with_a_flipped_bit):
            assert await load_into(stage.source, hashes, range(40, 48)) == 8
        assert (stage.memory[40:48] != content).sum() == 1


async def test_an_owner_that_hangs_is_waited_for_until_the_load_is_cancelled():
    async with TestTcpPeer().source_stage() as stage:
        hashes = chain(1, 8)
        await stage.put(hashes, random_blocks(8, 1))
        stage.is_hung = True
        done = asyncio.get_running_loop().create_future()
        load = stage.source.load(hashes, [BlockId(n) for n in range(40, 48)], done.set_result)
        await asyncio.sleep(0.3)
        assert not done.done()
        load.cancel()
        assert await done == 0
