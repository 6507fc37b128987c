"""Whatever comes from strangers and peers, the transfer library's parsers refuse it or understand it."""

import asyncio
import contextlib

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.descriptors import Descriptors, TransferOp
from penstock.core.errors import PenstockError
from penstock.transfer import RemoteRegion, TransferAgent, TransferConfig
from penstock.transfer.link.frames import TRANSFER_VERSION, AgentMetadata, encode_metadata
from penstock.transfer.transports.tcp_frames import (
    Done,
    Ended,
    Get,
    PackedRanges,
    Push,
    Put,
    Stop,
    encode_frame,
)
from tests.support.wire_targets import TARGETS, TcpOwner

U64 = st.integers(0, 2**64 - 1)
NUMBERS = st.one_of(st.sampled_from([0, 1, 8, 4095, 4096, 4097, 2**63, 2**64 - 8]), U64)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(TARGETS)), st.binary(max_size=300))
def test_any_bytes_are_understood_or_refused(target, data):
    TARGETS[target](data)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_bytes_that_were_right_once_are_understood_or_refused(data):
    region = PackedRanges(regions=(1,), keys=(b"k" * 8,), offsets=bytes(16), lengths=b"\1" + bytes(15))
    messages = [
        Put(exchange=1, ranges=region, payload=b"x"),
        Get(exchange=2, ranges=region, checksum=True),
        Push(exchange=3, stream=1, op=TransferOp.READ, ranges=region),
        Stop(exchange=3),
    ]
    frame = encode_frame(data.draw(st.sampled_from(messages)))
    metadata = encode_metadata(
        AgentMetadata(version=TRANSFER_VERSION, name="a", token=b"t" * 16, host=b"h" * 8)
    )
    for target, right in (("tcp_owner", len(frame).to_bytes(2, "little") + frame), ("metadata", metadata)):
        broken = bytearray(right)
        for _ in range(data.draw(st.integers(1, 4))):
            broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
        TARGETS[target](bytes(broken[: data.draw(st.integers(0, len(broken)))]))


@st.composite
def packed_ranges(draw):
    """Ranges of the owner's region with its key, and of others, in and outside, sometimes with columns that do not fit."""
    count = draw(st.integers(0, 4))
    column = st.lists(NUMBERS, min_size=count, max_size=count).map(
        lambda values: np.array(values, "<u8").tobytes()
    )
    other = st.one_of(column, st.binary(max_size=20))
    regions = draw(st.sampled_from([(1,), (1, 1), (2,), (1, 2), (), (-1,)]))
    return lambda key: PackedRanges(
        regions=regions,
        keys=tuple(key for _ in range(draw(st.sampled_from([len(regions), 1])))),
        offsets=draw(st.one_of(column, other)),
        lengths=draw(st.one_of(column, other)),
        of=draw(st.sampled_from([b"", bytes(4 * count), b"\1\0\0\0" * count, b"\xff" * 4 * count])),
    )


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_an_owner_answers_what_is_asked_and_touches_only_what_it_gave(data):
    async def scenario():
        owner = TcpOwner()
        for exchange in range(data.draw(st.integers(1, 5))):
            keys = [*owner.keys.values(), b"", b"k" * 8]
            ranges = data.draw(packed_ranges())(data.draw(st.sampled_from(keys)))
            ask = data.draw(
                st.sampled_from(
                    [
                        Put(
                            exchange=exchange,
                            ranges=ranges,
                            payload=bytes(data.draw(st.sampled_from([0, 1, 8, 4096]))),
                            checksums=data.draw(st.binary(max_size=8)),
                        ),
                        Get(exchange=exchange, ranges=ranges, checksum=data.draw(st.booleans())),
                        Push(exchange=exchange, stream=1, op=TransferOp.WRITE, ranges=ranges),
                    ]
                )
            )
            owner.feed(encode_frame(ask))
        for answer in owner.answers:
            assert isinstance(answer, Done | Ended)

    asyncio.run(scenario())


INTEGERS = st.one_of(NUMBERS, st.integers(-(2**63), -1))
REGION = {
    "region_id": INTEGERS,
    "kind": st.sampled_from(["dram", "shared", "vram", "file", "object", "tape"]),
    "size_bytes": INTEGERS,
    "read_key": st.sampled_from([b"", b"k" * 8, b"k" * 65, None]),
    "write_key": st.sampled_from([b"", b"k" * 8]),
    "name": st.text(max_size=4),
    "transport_info": st.dictionaries(
        st.sampled_from(["memory", "shm", "tcp", "nixl"]),
        st.one_of(
            st.binary(max_size=20),
            st.builds(
                lambda address, offset: msgspec.msgpack.encode({"address": address, "offset": offset}),
                INTEGERS,
                st.none() | INTEGERS,
            ),
        ),
    ),
}


RIGHT = {
    "region_id": 1,
    "kind": "dram",
    "size_bytes": 64,
    "read_key": b"k" * 8,
    "write_key": b"w" * 8,
    "transport_info": {"memory": b"", "tcp": b"", "shm": msgspec.msgpack.encode({"address": 4096})},
}


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(REGION)), st.data(), st.sampled_from(TransferOp))
def test_whatever_metadata_says_of_a_region_only_errors_of_this_library_come_of_it(field, data, op):
    regions = [RIGHT | {field: data.draw(REGION[field])}]

    async def scenario():
        config = TransferConfig(listen=("unix",), transports=("memory", "shm", "tcp"))
        async with TransferAgent("a", config) as agent, TransferAgent("b", config) as owner:
            metadata = owner.metadata()
            told = msgspec.msgpack.decode(metadata[4:]) | {"regions": regions}
            here = agent.register(bytearray(64))
            with contextlib.suppress(PenstockError):
                peer = await agent.connect(metadata[:4] + msgspec.msgpack.encode(told))
                for info in list(peer.infos.values()):
                    with contextlib.suppress(PenstockError):
                        there = RemoteRegion(info.region_id, info).ranges(0, 8)
                        await agent.post(op, here.ranges(0, 8), there, peer).wait()

    asyncio.run(scenario())


async def test_what_was_given_can_be_written_and_read():
    """So that the tests above are about more than refusals."""
    owner = TcpOwner()
    reading, writing = (
        PackedRanges.pack(Descriptors.of(1, [0, 4000], 96), {1: owner.keys[op]}) for op in TransferOp
    )
    payload = bytes(range(192))
    owner.feed(encode_frame(Put(exchange=1, ranges=writing, payload=payload)))
    owner.feed(encode_frame(Get(exchange=2, ranges=reading)))
    assert owner.answers == [Done(exchange=1), Done(exchange=2, payload=payload)]
