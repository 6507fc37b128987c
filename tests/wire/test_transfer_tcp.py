"""Transport `tcp` against peers that lie, on either side; what they say is refused, and memory stays as it was."""

import asyncio
import contextlib
import dataclasses
import struct

import numpy as np
import pytest

from penstock.core.descriptors import Descriptors, TransferCost
from penstock.core.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    PeerLost,
    ProtocolError,
    TransferCancelled,
    TransferError,
    TransferRefused,
    from_info,
)
from penstock.transfer import TransferAgent, TransferConfig, TransferOp
from penstock.transfer.config import TcpConfig
from penstock.transfer.transports.quiet import QuietTransport
from penstock.transfer.transports.tcp.transport import TcpTransport
from penstock.transfer.transports.tcp_frames import (
    Contact,
    Done,
    Ended,
    Get,
    Go,
    PackedRanges,
    Push,
    Put,
    Stop,
    StreamReady,
    decode_frame,
    encode_frame,
)
from tests.support.until import until

READ, WRITE = TransferOp.READ, TransferOp.WRITE
KIB, MIB = 1 << 10, 1 << 20
IDLE_S = 0.15
BOUNDS = TcpConfig(streams_per_peer_max=2, piece_bytes_max=MIB)
CONFIG = TransferConfig(listen=("unix",), timeout_s=60.0)


class Rogue(QuietTransport):
    """A transport `tcp` that says what a test has it say."""

    name = "tcp"
    checksums = False

    def __init__(self, contact=None):
        self.link = None
        self.heard = asyncio.Queue()
        self.streams = asyncio.Queue()
        self._sockets = []
        usual = Contact(version=1, streams=4, window=4, piece_bytes=64 * MIB)
        self._contact = encode_frame(usual) if contact is None else contact

    async def start(self, host): ...

    def contact(self):
        return self._contact

    def register(self, region_id, region, access):
        return b""

    async def deregister(self, region_id): ...

    async def connect(self, link, contact, regions):
        if link is None:
            raise TransferError("no")
        self.link, self.regions = link, regions
        return self

    def cost(self, op):
        return TransferCost(start_s=1.0, range_s=0.0, bytes_per_s=1.0)

    def forget(self, region_id): ...

    async def close(self):
        for stream in self._sockets:
            stream.close()

    def receive(self, link, payload):
        self.link = link
        self.heard.put_nowait(decode_frame(payload))

    def accept(self, link, stream):
        self.link = link
        self._sockets.append(stream)
        self.streams.put_nowait(stream)

    def lost(self, link, error): ...

    def say(self, frame):
        self.link.send("tcp", encode_frame(frame))

    async def hear(self, kind):
        frame = await self.heard.get()
        assert isinstance(frame, kind), frame
        return frame

    async def open_stream(self, number):
        stream = await self.link.open_stream("tcp")
        self._sockets.append(stream)
        with contextlib.suppress(BrokenPipeError):  # refused already
            stream.send(number.to_bytes(4, "little"))
        return stream

    async def ready_stream(self, number=1):
        stream = await self.open_stream(number)
        assert (await self.hear(StreamReady)).stream == number
        return stream


def _tcp(idle_s=60.0):
    return TcpTransport(BOUNDS, inline_bytes_max=64 * KIB, idle_s=idle_s)


class Scene:
    """A rogue agent and an honest one; `given` is half of the honest one's memory, `rest` is the other half."""

    def __init__(self, rogue, honest, transport):
        self.rogue, self.honest, self.transport = rogue, honest, transport
        self.memory = np.full(4 * MIB, 7, np.uint8)
        self.register()
        self.hidden = honest.register(self.memory[2 * MIB :], "hidden")

    def register(self):
        """Give `region` one key for both directions: these tests are of other lies."""
        made = self.honest.register(self.memory[: 2 * MIB], "given")
        self.region = dataclasses.replace(made, write_key=made.read_key)
        self.honest._table._registrations[made.region_id] = self.region

    def packed(self, offsets=0, lengths=KIB, key=None, region_id=None):
        region_id = region_id or self.region.region_id
        ranges = Descriptors.of(region_id, offsets, lengths)
        return PackedRanges.pack(ranges, {region_id: self.region.read_key if key is None else key})

    def untouched(self):
        return bool((self.memory == 7).all())

    async def lost(self):
        """Wait until the honest side has ended the link."""
        await until(lambda: self.rogue.link.error is not None)


@contextlib.asynccontextmanager
async def rogue_asks(idle_s=60.0):
    rogue = Rogue()
    async with (
        TransferAgent("rogue", CONFIG, transports=[rogue]) as agent,
        TransferAgent("honest", CONFIG, transports=[_tcp(idle_s)]) as honest,
    ):
        scene = Scene(rogue, honest, honest._transports["tcp"])
        await agent.connect(honest.metadata([scene.region]))
        yield scene
        # and another one is served as ever
        async with TransferAgent("friend", CONFIG, transports=[_tcp()]) as friend:
            peer = await friend.connect(honest.metadata([scene.region]))
            target = np.zeros(KIB, np.uint8)
            local = friend.register(target)
            await friend.post(READ, local.ranges(), scene.region.ranges(0, KIB), peer).wait()
            assert np.array_equal(target, scene.memory[:KIB])


_ASKS = {
    "put": lambda ranges: Put(exchange=5, ranges=ranges, payload=bytes(KIB)),
    "get": lambda ranges: Get(exchange=5, ranges=ranges),
    "write": lambda ranges: Push(exchange=5, stream=1, op=WRITE, ranges=ranges),
    "read": lambda ranges: Push(exchange=5, stream=1, op=READ, ranges=ranges),
}
_FORBIDDEN = {
    "a wrong key": lambda scene: scene.packed(key=bytes(8)),
    "no key": lambda scene: scene.packed(key=b""),
    "a region that was not given": lambda scene: scene.packed(region_id=scene.hidden.region_id),
    "a region that never was": lambda scene: scene.packed(region_id=99),
    "a range that ends outside": lambda scene: scene.packed(2 * MIB - KIB + 1),
    "a range that begins outside": lambda scene: scene.packed(2 * MIB + 1),
    "a range that wraps around": lambda scene: scene.packed(2**64 - KIB // 2),
    "one of two ranges outside": lambda scene: scene.packed([0, 2 * MIB - 1], KIB // 2),
}


@pytest.mark.parametrize("ask", _ASKS)
@pytest.mark.parametrize("wrong", _FORBIDDEN)
async def test_what_may_not_be_reached_is_refused(ask, wrong):
    async with rogue_asks() as scene:
        await scene.rogue.ready_stream()
        scene.rogue.say(_ASKS[ask](_FORBIDDEN[wrong](scene)))
        ended = await scene.rogue.hear(Ended)
        assert ended.exchange == 5
        assert isinstance(from_info(ended.error), TransferRefused)
        assert scene.honest.counters.refused == {"transfer_refused": 1}
        assert scene.untouched()


def _get(regions=(1,), keys=(b"",), offsets=bytes(8), lengths=bytes(8), of=b""):
    ranges = PackedRanges(regions=regions, keys=keys, offsets=offsets, lengths=lengths, of=of)
    return lambda _scene: Get(exchange=1, ranges=ranges)


def _put(size, checksums=b""):
    return lambda scene: Put(exchange=1, ranges=scene.packed(), payload=bytes(size), checksums=checksums)


_NONSENSE = {
    "a payload that is too short": _put(KIB - 1),
    "a payload that is too long": _put(KIB + 1),
    "checksums of other ranges": _put(KIB, bytes(8)),
    "more than fits a message": lambda scene: Get(exchange=1, ranges=scene.packed([0, 0], MIB // 2 + 1)),
    "more than a piece": lambda scene: Push(
        exchange=1, stream=1, op=READ, ranges=scene.packed([0, 0], MIB // 2 + 1)
    ),
    "ranges without lengths": _get(lengths=b""),
    "no ranges": _get(offsets=b"", lengths=b""),
    "regions without keys": _get(regions=(1, 2)),
    "a range of a region that is not listed": _get(regions=(1, 2), keys=(b"", b""), of=b"\2\0\0\0"),
    "a region id of no number": _get(regions=(-1,)),
    "an answer": lambda scene: Done(exchange=1),
}


@pytest.mark.parametrize("what", _NONSENSE)
async def test_nonsense_ends_the_link_with_an_error_on_both_sides(what):
    async with rogue_asks() as scene:
        await scene.rogue.ready_stream()
        scene.rogue.say(_NONSENSE[what](scene))
        await scene.lost()
        assert scene.honest.counters.refused == {"protocol_error": 1}
        assert isinstance(scene.honest.refusals[0], ProtocolError)
        assert scene.untouched()


async def test_streams_are_counted_have_one_number_and_one_exchange_each():
    recv = asyncio.get_running_loop().sock_recv
    async with rogue_asks() as scene:
        scene.rogue.say(Push(exchange=1, stream=9, op=WRITE, ranges=scene.packed()))
        assert "stream 9 has ended" in (await scene.rogue.hear(Ended)).error.message
        await scene.rogue.ready_stream(1)
        assert await recv(await scene.rogue.open_stream(1), 1) == b"", "its number is taken"
        await scene.rogue.ready_stream(2)
        with contextlib.suppress(ConnectionError):
            assert await recv(await scene.rogue.open_stream(3), 1) == b"", "two are enough"
        assert len(scene.transport._room.streams) == 2
        for exchange in (1, 2):
            scene.rogue.say(Push(exchange=exchange, stream=1, op=WRITE, ranges=scene.packed()))
        await scene.lost()
        assert "which is in use" in scene.honest.refusals[-1].message


def _header(exchange, num_bytes, magic=b"PTA data"):
    return struct.pack("<8sQQ", magic, exchange, num_bytes)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (_header(1, KIB, b"PTA junk") + bytes(KIB), "protocol_error"),
        (_header(2, KIB) + bytes(KIB), "protocol_error"),
        (_header(1, KIB + 1) + bytes(KIB + 1), "protocol_error"),
        (b"", "transfer_error"),
        (_header(1, KIB)[:7], "transfer_error"),
    ],
)
async def test_a_stream_that_brings_something_else_is_refused_before_memory_is_touched(sent, code):
    async with rogue_asks(idle_s=IDLE_S) as scene:
        stream = await scene.rogue.ready_stream()
        scene.rogue.say(Push(exchange=1, stream=1, op=WRITE, ranges=scene.packed()))
        await scene.rogue.hear(Go)
        stream.send(sent)
        ended = await scene.rogue.hear(Ended)
        assert ended.error.code == code
        assert scene.honest.counters.refused == {code: 1}
        assert scene.untouched()
        assert not scene.transport._room.streams


async def test_too_few_bytes_are_an_error_soon():
    async with rogue_asks(idle_s=IDLE_S) as scene:
        stream = await scene.rogue.ready_stream()
        scene.rogue.say(Push(exchange=1, stream=1, op=WRITE, ranges=scene.packed()))
        await scene.rogue.hear(Go)
        stream.send(_header(1, KIB) + bytes(100))
        ended = await scene.rogue.hear(Ended)
        assert "none for 0.15 s" in ended.error.message
        assert scene.honest.counters.refused == {"transfer_error": 1}
        assert (scene.memory[KIB:] == 7).all()


async def test_a_stream_that_ends_early_is_an_error_at_once():
    async with rogue_asks() as scene:
        stream = await scene.rogue.ready_stream()
        scene.rogue.say(Push(exchange=1, stream=1, op=WRITE, ranges=scene.packed()))
        await scene.rogue.hear(Go)
        stream.send(_header(1, KIB) + bytes(100))
        stream.close()
        ended = await scene.rogue.hear(Ended)
        assert "ended after 100 bytes" in ended.error.message


async def test_more_bytes_than_announced_reach_no_memory():
    async with rogue_asks(idle_s=IDLE_S) as scene:
        stream = await scene.rogue.ready_stream()
        scene.rogue.say(Push(exchange=1, stream=1, op=WRITE, ranges=scene.packed(0, KIB)))
        await scene.rogue.hear(Go)
        stream.send(_header(1, KIB) + bytes(9 * KIB))
        await scene.rogue.hear(Done)
        await until(lambda: not scene.transport._room.streams)
        assert not scene.memory[:KIB].any()
        assert (scene.memory[KIB:] == 7).all()


async def test_who_reads_nothing_is_given_up():
    async with rogue_asks(idle_s=IDLE_S) as scene:
        scene.transport._config = scene.transport._server.config  # the bound is what makes it a megabyte
        stream = await scene.rogue.ready_stream()
        stream.setsockopt(1, 8, 4096)  # SO_RCVBUF
        for exchange in range(1, 20):
            scene.rogue.say(Push(exchange=exchange, stream=1, op=READ, ranges=scene.packed(0, MIB)))
            frame = await scene.rogue.hear((Done, Ended))
            if isinstance(frame, Ended):
                break
        assert "none for 0.15 s" in frame.error.message


async def test_a_wrong_checksum_is_an_error_on_both_sides():
    async with rogue_asks() as scene:
        scene.rogue.say(Put(exchange=1, ranges=scene.packed(), payload=bytes(KIB), checksums=b"\1\2\3\4"))
        assert (await scene.rogue.hear(Ended)).error.code == "checksum_mismatch"
        stream = await scene.rogue.ready_stream()
        scene.rogue.say(Push(exchange=2, stream=1, op=WRITE, ranges=scene.packed(), checksum=True))
        await scene.rogue.hear(Go)
        stream.send(_header(2, KIB) + bytes(KIB) + b"\1\2\3\4")
        assert (await scene.rogue.hear(Ended)).error.code == "checksum_mismatch"
        assert scene.honest.counters.refused == {"checksum_mismatch": 2}
        assert (scene.memory[KIB:] == 7).all()


async def test_stopping_lets_go_and_what_stops_late_is_no_error():
    async with rogue_asks(idle_s=IDLE_S) as scene:
        await scene.rogue.ready_stream()
        scene.rogue.say(Push(exchange=1, stream=1, op=WRITE, ranges=scene.packed()))
        await scene.rogue.hear(Go)
        scene.rogue.say(Stop(exchange=1))
        assert "the peer ended" in (await scene.rogue.hear(Ended)).error.message
        scene.rogue.say(Stop(exchange=1))
        scene.rogue.say(Get(exchange=2, ranges=scene.packed()))
        await scene.rogue.hear(Done)
        assert scene.honest.counters.refused == {}


# -- and now the owner lies ------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def rogue_answers(contact=None, idle_s=60.0):
    rogue = Rogue(contact)
    async with (
        TransferAgent("rogue", CONFIG, transports=[rogue]) as owner,
        TransferAgent("honest", CONFIG, transports=[_tcp(idle_s)]) as honest,
    ):
        scene = Scene(rogue, honest, honest._transports["tcp"])
        scene.theirs = owner.register(np.zeros(4 * MIB, np.uint8), "theirs")
        scene.peer = await honest.connect(owner.metadata([scene.theirs]))
        yield scene


def _post(scene, op, num_bytes, **options):
    local, remote = scene.region.ranges(0, num_bytes), scene.theirs.ranges(0, num_bytes)
    return scene.honest.post(op, local, remote, scene.peer, **options)


@pytest.mark.parametrize("size", [0, KIB - 1, KIB + 1])
async def test_an_answer_of_another_size_is_an_error(size):
    async with rogue_answers() as scene:
        handle = _post(scene, READ, KIB)
        await scene.rogue.hear(Get)
        scene.rogue.say(Done(exchange=1, payload=bytes(size)))
        with pytest.raises(ProtocolError, match=f"{size} bytes for ranges of 1024"):
            await handle.wait()
        assert scene.untouched()


async def _greeted(scene):
    """Take the stream that the honest side opens."""
    stream = await scene.rogue.streams.get()
    number = int.from_bytes(await asyncio.get_running_loop().sock_recv(stream, 4), "little")
    scene.rogue.say(StreamReady(stream=number))
    return stream


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (_header(9, MIB), ProtocolError),
        (_header(1, MIB - 1), ProtocolError),
        (b"nonsense" * 3, ProtocolError),
        (b"", TransferError),
    ],
)
async def test_a_read_that_brings_something_else_is_an_error(sent, error):
    async with rogue_answers(idle_s=IDLE_S) as scene:
        handle = _post(scene, READ, MIB)
        stream = await _greeted(scene)
        await scene.rogue.hear(Push)
        stream.send(sent)
        scene.rogue.say(Done(exchange=1))
        with pytest.raises(error):
            await handle.wait()
        assert scene.untouched()


async def test_a_read_whose_checksum_differs_is_an_error_on_both_sides():
    async with rogue_answers() as scene:
        handle = _post(scene, READ, KIB, checksum=True)
        await scene.rogue.hear(Get)
        scene.rogue.say(Done(exchange=1, payload=bytes(KIB), checksums=b"\1\2\3\4"))
        with pytest.raises(ChecksumMismatch):
            await handle.wait()
        assert (await scene.rogue.hear(Stop)).error.code == "checksum_mismatch"
        assert scene.untouched()


@pytest.mark.parametrize(("op", "size"), [(READ, KIB), (WRITE, KIB), (READ, MIB), (WRITE, MIB)])
async def test_silence_ends_at_the_deadline(op, size):
    async with rogue_answers(idle_s=IDLE_S) as scene:
        handle = _post(scene, op, size, timeout_s=0.05)
        if size == MIB:
            await _greeted(scene)
        with pytest.raises(DeadlineExceeded):
            await handle.wait()


@pytest.mark.parametrize("op", [READ, WRITE])
async def test_a_cancelled_transfer_ends_when_the_owner_has_let_go(op):
    async with rogue_answers(idle_s=IDLE_S) as scene:
        handle = _post(scene, op, MIB)
        await _greeted(scene)
        asked = await scene.rogue.hear(Push)
        handle.cancel()
        assert (await scene.rogue.hear(Stop)).exchange == asked.exchange
        assert handle.is_pending
        scene.rogue.say(Ended(exchange=asked.exchange, error=TransferError("as you wish").to_info()))
        with pytest.raises(TransferCancelled):
            await handle.wait()


async def test_a_read_that_brings_nothing_is_an_error_soon():
    async with rogue_answers(idle_s=IDLE_S) as scene:
        handle = _post(scene, READ, MIB)
        await _greeted(scene)
        with pytest.raises(TransferError, match=r"none for 0\.15 s"):
            await handle.wait()


async def test_a_stream_that_nobody_greets_is_an_error():
    async with rogue_answers(idle_s=IDLE_S) as scene:
        handle = _post(scene, WRITE, MIB)
        with pytest.raises(TransferError, match="stream 1 is not answered"):
            await handle.wait()


async def test_a_stream_that_is_closed_instead_of_greeted_is_an_error():
    async with rogue_answers() as scene:
        handle = _post(scene, WRITE, MIB)
        (await scene.rogue.streams.get()).close()
        with pytest.raises(TransferError, match="takes no more streams"):
            await handle.wait()


@pytest.mark.parametrize("size", [KIB, MIB])
async def test_the_owners_word_is_what_is_raised(size):
    async with rogue_answers() as scene:
        handle = _post(scene, WRITE, size)
        if size == MIB:
            await _greeted(scene)
        await scene.rogue.hear((Put, Push))
        scene.rogue.say(Ended(exchange=1, error=TransferRefused("because").to_info()))
        with pytest.raises(TransferRefused, match="because"):
            await handle.wait()


@pytest.mark.parametrize(
    ("contact", "why"),
    [
        (b"\xff", "cannot be read"),
        (b"", "cannot be read"),
        (encode_frame(Contact(version=7, streams=1, window=1, piece_bytes=1)), "speaks version 7"),
        (encode_frame(Contact(version=1, streams=0, window=1, piece_bytes=1)), "lets nothing through"),
    ],
)
async def test_a_contact_that_makes_no_sense_is_why_it_is_not_reached(contact, why):
    async with rogue_answers(contact) as scene:
        assert why in scene.peer.unreachable["tcp"]
        with pytest.raises(TransferRefused, match=why):
            _post(scene, WRITE, KIB)


async def test_questions_to_who_asks_end_the_link():
    async with rogue_answers() as scene:
        scene.rogue.link = next(iter(scene.honest._connections._links.values()))
        handle = _post(scene, WRITE, KIB)
        await scene.rogue.hear(Put)
        scene.rogue.say(Get(exchange=1, ranges=scene.packed()))
        with pytest.raises(PeerLost):
            await handle.wait()
        assert scene.honest.counters.refused == {"protocol_error": 1}
