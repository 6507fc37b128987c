"""What peers may say about shared memory: lies, garbage, old answers; and what is left of a mapping afterwards."""

import asyncio
import gc
import mmap
import os
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.core.descriptors import Granted, Region, TransferOp
from penstock.core.errors import PeerLost, TransferRefused
from penstock.core.wire import encode
from penstock.testing.transports.harness import Bytes, TwoAgents
from penstock.transfer import Access, Arena, MemoryKind, TransferCancelled, TransferConfig, TransferError
from penstock.transfer.regions import copies
from penstock.transfer.transports import shm
from penstock.transfer.transports.shm import MappedArena, ShmRegion, ShmTransport, is_ending, why_untraceable
from tests.support.until import until

READ, WRITE = TransferOp.READ, TransferOp.WRITE
SIZE = 1 << 16


class Arenas(TwoAgents):
    """Two agents of shared memory, in an arena each."""

    def __init__(self, listen: str = "unix") -> None:
        super().__init__(self.transports, size_bytes=SIZE, config=TransferConfig(listen=(listen,)))

    @staticmethod
    def transports() -> list[ShmTransport]:
        return [ShmTransport(threads=1, inline_bytes_max=0)]

    def make_memory(self) -> tuple[Bytes, object]:
        arena = Arena.create(self.size_bytes)
        return arena.array, arena

    async def move(self, op: TransferOp = READ) -> None:
        await self.agent.post(op, self.local.ranges(), self.remote.ranges(), self.peer).wait()


FDS_OF_AN_ARENA = 2  # its own, and one that mmap keeps


def mappings(access: str = "") -> int:
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("penstock-arena" in line and access in line for line in lines)


def descriptors() -> int:
    gc.collect()  # what earlier tests left is closed now, and not while this one counts
    return len(list(Path("/proc/self/fd").iterdir()))


class TestMappings:
    async def test_an_arena_is_mapped_once_and_let_go_with_its_last_region(self):
        async with Arenas() as two:
            with Arena.create(4 * SIZE) as arena:
                parts = [two.owner.register(arena.array[at : at + SIZE], f"part{at}") for at in (0, SIZE)]
                peer = await two.agent.connect(two.owner.metadata(parts))
                arena.array[SIZE] = 9
                before = mappings(), descriptors()
                for part in parts:
                    for op in (WRITE, READ):
                        remote = peer.region(part.region.name)
                        await two.agent.post(op, two.local.ranges(0, 8), remote.ranges(8, 8), peer).wait()
                assert (mappings(), descriptors()) == (before[0] + 1, before[1] + FDS_OF_AN_ARENA)
                await two.owner.deregister(parts[0])
                assert mappings() == before[0] + 1
                await two.owner.deregister(parts[1])
                await until(lambda: (mappings(), descriptors()) == before)

    async def test_a_prepared_list_does_not_keep_a_mapping(self):
        async with Arenas() as two:
            prepared = two.agent.prepare(two.local.ranges(), two.remote.ranges(), two.peer)
            await prepared.post(READ).wait()
            before = mappings()
            await two.agent.disconnect(two.peer)
            assert mappings() == before - 1
            with pytest.raises(PeerLost):
                await prepared.post(READ).wait()

    async def test_nothing_is_left_of_agents_that_have_closed(self):
        before = mappings(), descriptors()
        async with Arenas() as two:
            await two.move()
            await two.move(WRITE)
        del two
        await until(lambda: mappings() == before[0] and descriptors() <= before[1])

    async def test_what_was_given_to_read_cannot_be_mapped_for_writing_by_any_means(self):
        async with Arenas() as two:
            with Arena.create(SIZE) as arena:
                given = two.owner.register(arena, "given", access=Access.READ)
                peer = await two.agent.connect(two.owner.metadata([given]))
                await two.agent.post(READ, two.local.ranges(), peer.region("given").ranges(), peer).wait()
                (theirs, _), *_ = peer.routes["shm"].channel._arenas.values()
                for access in (os.O_RDONLY, os.O_RDWR):
                    fd = os.open(f"/proc/self/fd/{theirs.fd}", access)
                    with pytest.raises(PermissionError):
                        mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
                    with pytest.raises(OSError, match=r"Operation not permitted|Bad file descriptor"):
                        os.write(fd, b"x")
                    os.close(fd)
                arena.array[0] = 9
                assert theirs.array[0] == 9, "its owner goes on writing"

    async def test_what_was_given_to_write_is_not_mapped_since_it_could_be_read(self):
        async with Arenas() as two:
            with Arena.create(SIZE) as arena:
                given = two.owner.register(arena, "given", access=Access.WRITE)
                peer = await two.agent.connect(two.owner.metadata([given]))
                two.write_local(np.full(SIZE, 4, np.uint8))
                await two.agent.post(WRITE, two.local.ranges(), peer.region("given").ranges(), peer).wait()
                assert (arena.array == 4).all()
                assert not peer.routes["shm"].channel._arenas

    async def test_more_access_that_is_given_later_is_used(self):
        async with Arenas() as two:
            with Arena.create(SIZE) as arena:
                given = two.owner.register(arena, "given")
                peer = await two.agent.connect(two.owner.metadata([given], access=Access.READ))
                ranges = two.local.ranges(), peer.region("given").ranges()
                await two.agent.post(READ, *ranges, peer).wait()
                await two.agent.connect(two.owner.metadata([given], access=Access.WRITE))
                two.write_local(np.full(SIZE, 4, np.uint8))
                await two.agent.post(WRITE, *ranges, peer).wait()
                assert (arena.array == 4).all()
                await two.agent.post(READ, *ranges, peer).wait()

    async def test_arenas_and_private_memory_in_one_list(self):
        async with Arenas() as two:
            private = np.arange(SIZE, dtype=np.uint8)
            given = two.owner.register(private, "private")
            peer = await two.agent.connect(two.owner.metadata([given]))
            await two.write_remote(np.full(SIZE, 3, np.uint8))
            remote = type(two.remote.ranges()).joined(
                [
                    peer.region("private").ranges([0, 200], 100),
                    two.remote.ranges(50, 100),
                    peer.region("private").ranges(900, 7),
                ]
            )
            local = two.local.ranges([0, 100, 200, 300], [100, 100, 100, 7])
            await two.agent.post(READ, local, remote, peer).wait()
            expected = np.concatenate([private[:100], private[200:300], np.full(100, 3), private[900:907]])
            assert np.array_equal(two.read_local()[:307], expected)


class TestLyingOwners:
    @pytest.mark.parametrize("place", [{"offset": SIZE}, {"offset": -8}, {"offset": 2**62}, {"offset": 1}])
    async def test_a_region_that_is_not_within_its_arena(self, place):
        async with Arenas() as two:
            lie = encode(ShmRegion(address=0, **place))
            info = msgspec.structs.replace(two.remote.info, transport_info={"shm": lie})
            two.peer.infos[two.remote.region_id] = info
            before = mappings()
            for op in (READ, WRITE):
                with pytest.raises(TransferRefused, match="outside of its arena"):
                    await two.move(op)
            assert mappings() == before

    @pytest.mark.parametrize("lie", [b"", b"\xc1", b"\x80", encode(MappedArena(size_bytes=1))])
    async def test_a_way_that_is_none(self, lie):
        async with Arenas() as two:
            info = msgspec.structs.replace(two.remote.info, transport_info={"shm": lie})
            two.peer.infos[two.remote.region_id] = info
            with pytest.raises(TransferRefused, match="did not register"):
                await two.move()

    async def test_an_arena_that_could_shrink(self, monkeypatch):
        async with Arenas() as two:
            fd = os.memfd_create("loose")
            os.ftruncate(fd, SIZE)
            monkeypatch.setattr(Arena, "open", lambda *_, **__: os.dup(fd))
            before = mappings()
            with pytest.raises(TransferRefused, match="not sealed"):
                await two.move()
            assert mappings() == before
            os.close(fd)

    @pytest.mark.parametrize("payload", [b"", b"\xc1", encode(MappedArena(size_bytes=2 * SIZE))])
    async def test_an_arena_that_is_described_wrongly(self, payload):
        async with Arenas() as two:
            (transport,) = two.owner._transports.values()
            grant = transport.grant

            async def lie(*arguments) -> Granted:
                return Granted(payload, (await grant(*arguments)).descriptor)

            transport.grant = lie
            before = mappings()
            with pytest.raises(TransferRefused, match="arena"):
                await two.move()
            assert mappings() == before

    async def test_messages_that_are_none_end_the_link(self):
        async with Arenas() as two:
            two.owner._connections.link_to("reader").send("shm", b"\xc1")
            await until(lambda: two.peer.link.error is not None)
            with pytest.raises(PeerLost, match="transport shm"):
                await two.move()


async def test_a_cancelled_request_leaves_no_descriptor():
    async with Arenas() as two:
        handle = two.agent.post(READ, two.local.ranges(), two.remote.ranges(), two.peer)
        await asyncio.sleep(0)  # it asks
        handle.cancel()
        with pytest.raises(TransferCancelled):
            await handle.wait()
        before = descriptors()
        await two.move(WRITE)
        assert descriptors() == before + FDS_OF_AN_ARENA, "and not the cancelled answer's"


class TestPrivateMemory:
    async def test_it_is_refused_where_the_kernel_refuses(self, monkeypatch):
        def refuse(*_):
            return "the kernel refuses"

        monkeypatch.setattr(shm, "why_untraceable", refuse)
        async with Arenas() as two:
            await two.move()
            hidden = two.owner.register(np.zeros(100, np.uint8), "hidden")
            peer = await two.agent.connect(two.owner.metadata([hidden]))
            with pytest.raises(TransferRefused, match="private, and the kernel refuses; give an Arena"):
                two.agent.post(READ, two.local.ranges(0, 8), peer.region("hidden").ranges(0, 8), peer)

    async def test_a_link_over_tcp_does_not_say_whose_memory_it_is(self):
        with pytest.raises(TransferRefused, match="over TCP the kernel does not say which process it is"):
            await Arenas("tcp://127.0.0.1:0").__aenter__()

    async def test_memory_that_went_although_it_was_registered(self):
        async with Arenas() as two:
            gone = Region(MemoryKind.DRAM, 100, "gone", 4096)
            given = two.owner.register(gone)
            peer = await two.agent.connect(two.owner.metadata([given]))
            with pytest.raises(TransferError, match="has to stay as long as it is registered"):
                await two.agent.post(
                    READ, two.local.ranges(0, 8), peer.region("gone").ranges(0, 8), peer
                ).wait()

    def test_the_nonce_tells_who_a_process_is(self):
        nonce = np.frombuffer(b"0123456789abcdef", np.uint8)
        assert why_untraceable(os.getpid(), nonce.ctypes.data, nonce.tobytes()) is None
        assert "not that agent" in why_untraceable(os.getpid(), nonce.ctypes.data, b"x" * 16)
        assert "No such process" in why_untraceable(2**22 + 1, nonce.ctypes.data, b"x" * 16)


class TestEnds:
    async def test_a_copy_under_way_is_ended(self, monkeypatch):
        monkeypatch.setattr("penstock.transfer.transports.shm._WATCH_S", 0.001)
        async with Arenas() as two:
            is_held, let_go = threading.Event(), threading.Event()
            copy = copies.copy_ranges

            def slow(*arguments):
                is_held.set()
                assert let_go.wait(5)
                return copy(*arguments)

            await two.move()
            monkeypatch.setattr(copies, "copy_ranges", slow)
            handle = two.agent.post(READ, two.local.ranges(), two.remote.ranges(), two.peer)
            await asyncio.to_thread(is_held.wait)
            monkeypatch.setattr("penstock.transfer.transports.shm.is_ending", lambda _: True)
            await asyncio.sleep(0.02)
            assert handle.is_pending, "memory is still in use"
            let_go.set()
            with pytest.raises(PeerLost, match="is ending"):
                await handle.wait()

    def test_processes_that_are_there_and_that_are_not(self):
        assert not is_ending(os.getpid())
        assert is_ending(2**22 + 1)
        child = os.posix_spawn("/bin/true", ["true"], {})
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert is_ending(child), "a zombie"
        os.waitpid(child, 0)
        assert is_ending(child)
