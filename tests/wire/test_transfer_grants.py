"""Requests for memory: what hostile peers may send on either side, descriptors that nobody took, and bounds."""

import asyncio
import contextlib
import gc
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from penstock.core.descriptors import Granted, TransferOp
from penstock.core.errors import PeerLost, ProtocolError, TransferError, TransferRefused
from penstock.core.wire import encode
from penstock.transfer import Access, TransferAgent, TransferConfig
from penstock.transfer.link import grants
from penstock.transfer.link.grants import GRANTS, Grant, GrantRequest, request_over
from penstock.transfer.transports.quiet import QuietTransport
from tests.support.until import until

READ, WRITE = TransferOp.READ, TransferOp.WRITE


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


class Giving(QuietTransport):
    """A transport that answers with what it is told to, and moves nothing."""

    name = "giving"
    checksums = False

    def __init__(self) -> None:
        self.asked: list[tuple[dict, bytes]] = []
        self.answers = Granted(b"answer")
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def start(self, host) -> None: ...

    def contact(self) -> bytes:
        return b""

    def register(self, region_id, region, access) -> bytes:
        return b""

    async def deregister(self, region_id) -> None: ...

    async def connect(self, link, contact, regions):
        raise TransferError("it moves nothing")

    async def grant(self, link, keys, payload) -> Granted:
        self.asked.append((keys, payload))
        await self.goes_on.wait()
        return self.answers

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def two_agents(listen: str = "unix"):
    config = TransferConfig(listen=(listen,), connect_timeout_s=1.0, heartbeat_timeout_s=0.5)
    giving = Giving()
    async with (
        TransferAgent("owner", config, transports=[giving]) as owner,
        TransferAgent("reader", config, transports=[Giving()]) as reader,
    ):
        given = owner.register(np.zeros(64, np.uint8), "given", access=Access.READ)
        peer = await reader.connect(owner.metadata())
        yield owner, giving, given, peer.link


@pytest.mark.parametrize("listen", ["memory", "unix"])
async def test_who_shows_a_key_gets_the_transports_answer_and_is_known_to_have_it(listen):
    async with two_agents(listen) as (owner, giving, given, link):
        keys = {READ: {given.region_id: given.read_key}}
        answer = await link.request("giving", keys, b"payload")
        assert (answer.payload, answer.descriptor) == (b"answer", None)
        assert giving.asked == [(keys, b"payload")]
        theirs = owner._connections.link_to("reader")
        assert set(owner.grants.to(theirs)) == {given.region_id}
        await owner.deregister(given)
        assert not owner.grants.to(theirs)


async def test_a_wrong_key_a_wrong_direction_and_a_transport_that_is_none_are_refused():
    async with two_agents() as (owner, giving, given, link):
        key = given.region_id, given.read_key
        for keys in (
            {READ: {given.region_id: b"x" * 8}},
            {WRITE: dict([key])},
            {WRITE: {given.region_id: given.write_key}},
            {READ: dict([key, (given.region_id + 1, b"x" * 8)])},
            {READ: {2**63 - 1: b""}},
        ):
            with pytest.raises(TransferRefused):
                await link.request("giving", keys)
        with pytest.raises(TransferRefused, match="does not have it"):
            await link.request("taking", {READ: dict([key])})
        assert not giving.asked
        assert not owner.grants.to(owner._connections.link_to("reader"))
        assert sum(owner.counters.refused.values()) == 5


async def test_a_descriptor_comes_with_its_answer_and_the_owner_keeps_none():
    async with two_agents() as (_, giving, given, link):
        keys = {READ: {given.region_id: given.read_key}}
        before = descriptors()
        for _ in range(3):
            read, write = os.pipe()
            giving.answers = Granted(b"", read)
            answer = await link.request("giving", keys)
            os.write(write, b"x")
            assert os.read(answer.descriptor, 1) == b"x"
            os.close(write)
            answer.close()
        await until(lambda: descriptors() == before)


async def test_over_tcp_no_descriptor_can_be_sent():
    async with two_agents("tcp://127.0.0.1:0") as (_, giving, given, link):
        before = descriptors()
        read, write = os.pipe()
        giving.answers = Granted(b"", read)
        with pytest.raises(TransferError, match="did not come together"):
            await link.request("giving", {READ: {given.region_id: given.read_key}})
        os.close(write)
        await until(lambda: descriptors() == before)


async def test_a_region_that_goes_while_a_request_is_answered_is_not_exposed():
    async with two_agents() as (owner, giving, given, link):
        giving.goes_on.clear()
        read, write = os.pipe()
        giving.answers = Granted(b"", read)
        asking = asyncio.ensure_future(link.request("giving", {READ: {given.region_id: given.read_key}}))
        await until(lambda: giving.asked)
        await owner.deregister(given)
        giving.goes_on.set()
        with pytest.raises(TransferRefused, match="not registered"):
            await asking
        assert not owner.grants.to(owner._connections.link_to("reader"))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(read)
        os.close(write)


async def test_more_requests_than_may_be_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(grants, "_REQUESTS_MAX", 2)
    monkeypatch.setattr("penstock.transfer.link.links._LINK_ENDS_S", 0.01)
    async with two_agents() as (owner, giving, given, link):
        giving.goes_on.clear()
        keys = {READ: {given.region_id: given.read_key}}
        asking = [asyncio.ensure_future(link.request("giving", keys)) for _ in range(2)]
        await until(lambda: len(giving.asked) == 2)
        with pytest.raises(PeerLost):
            await link.request("giving", keys)
        assert "requests for memory at once" in owner.refusals[-1].message
        giving.goes_on.set()
        assert [answer.payload for answer in await asyncio.gather(*asking)] == [b"answer"] * 2


@pytest.mark.parametrize(
    "data", [b"\xff" * 4, framed(b"\xc1"), framed(b"\x80"), framed(encode({"transport": 1}))]
)
async def test_a_request_that_is_none_is_refused_and_the_link_lives_on(data):
    async with two_agents() as (owner, _, given, link):
        connection = await link.open_stream(GRANTS)
        with connection:
            connection.send(data)
            assert await asyncio.get_running_loop().sock_recv(connection, 100) == b""
        assert owner.counters.refused == {"protocol_error": 1}
        assert (await link.request("giving", {READ: {given.region_id: given.read_key}})).payload == b"answer"


async def test_descriptors_that_a_peer_sends_along_are_closed():
    async with two_agents() as (_, __, given, link):
        before = descriptors()
        request = GrantRequest(transport="giving", keys={READ: {given.region_id: given.read_key}})
        connection = await link.open_stream(GRANTS)
        with connection:
            for byte in framed(encode(request)):  # in pieces
                socket.send_fds(connection, [bytes([byte])], [0])
                await asyncio.sleep(0)
            assert await asyncio.get_running_loop().sock_recv(connection, 1000)
        await until(lambda: descriptors() == before)


async def test_who_sends_no_request_is_given_up():
    async with two_agents() as (_, __, ___, link):
        connection = await link.open_stream(GRANTS)
        with connection:
            assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""


@pytest.mark.parametrize(
    ("data", "sends_fd", "error"),
    [
        (framed(encode(Grant())), True, ProtocolError),
        (framed(encode(Grant(has_descriptor=True))), False, ProtocolError),
        (framed(b"\xc1"), True, ProtocolError),
        (b"\xff" * 8, True, ProtocolError),
        (framed(encode(Grant()))[:-1], True, EOFError),
        (b"", False, EOFError),
    ],
)
async def test_an_answer_that_is_none_leaves_no_descriptor(data, sends_fd, error):
    before = descriptors()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        if sends_fd:
            socket.send_fds(theirs, [data], [0])
        else:
            theirs.send(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(error):
            await request_over(ours, GrantRequest(transport="x"))
    assert descriptors() == before
