"""What only a socket can show: unauthenticated clients, broken peers, full buffers, silence."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import msgspec
import pytest
from structlog.testing import capture_logs

from penstock.core.errors import Backlogged, ConfigError, Overloaded, ProtocolError, RequestError, WorkerLost
from penstock.core.framing import LENGTH_BYTES, Challenge, FrameReader
from penstock.core.hashing import HASH_VERSION
from penstock.core.wire import WIRE_VERSION
from penstock.runtime import handshake
from penstock.runtime.config import EventConfig, PlaneConfig
from penstock.runtime.handshake import HelloReply, Identity
from penstock.runtime.requests.outbox import CODEC, Deltas, Event, Grant, Submit, Subscribe
from penstock.runtime.requests.tcp import TcpPlane
from penstock.testing.planes.harness import SECRET, TcpPlaneHarness
from penstock.testing.planes.request_plane import Scene
from penstock.testing.planes.scripted_worker import (
    RecordingSink,
    ScriptedWorker,
    scripted_instance,
    scripted_request,
)

IDENTITY = Identity(process="test", secret=b"s")
WORKER_IDENTITY = replace(IDENTITY, worker_id=7)


class RawClient:
    """Speaks frames by hand."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.frames = FrameReader(1 << 24)
        self.received = []

    @classmethod
    async def dial(cls, address):
        host, port = address.removeprefix("tcp://").split(":")
        client = cls(*await asyncio.open_connection(host, int(port)))
        client.challenge = await client.receive(Challenge)
        return client

    def send(self, message):
        self.writer.write(CODEC.encode(message))

    async def receive(self, kind):
        """Give the next message of a kind; None at the end of the stream."""
        while True:
            while self.received:
                message = self.received.pop(0)
                if isinstance(message, kind):
                    return message
            data = await self.reader.read(65536)
            if not data:
                return None
            self.received += map(CODEC.decode, self.frames.feed(data))

    async def greet(self, identity=IDENTITY, **changes):
        hello = handshake.hello(identity, self.challenge, window_tokens=10**9)
        self.send(msgspec.structs.replace(hello, **changes))
        return await self.receive(HelloReply)

    async def ended(self):
        assert await self.receive(()) is None

    async def close(self):
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


@asynccontextmanager
async def serving(config=None):
    worker = ScriptedWorker()
    server = await TcpPlane(WORKER_IDENTITY, config=config).serve(worker)
    try:
        yield scripted_instance(server.address, worker_id=7), worker
    finally:
        await server.close()


@asynccontextmanager
async def raw(instance):
    client = await RawClient.dial(instance.address)
    try:
        yield client
    finally:
        await client.close()


async def echoes(instance, identity=IDENTITY, config=None):
    """Check that a worker answers a frontend that behaves."""
    sink = RecordingSink()
    connection = await TcpPlane(identity, config=config).connect(instance, sink)
    connection.submit(scripted_request("echo", [1, 2], request_id="e"))
    await sink.finished("e")
    await connection.close()
    return sink.tokens("e") == [1, 2]


@pytest.mark.parametrize(
    ("identity", "what"),
    [
        (Identity(secret=b"other"), "deployment secret"),
        (Identity(secret=b"s", hash_key=b"k" * 16), "hash key: the peer's has the fingerprint"),
    ],
)
async def test_a_frontend_of_another_deployment_is_refused(identity, what):
    async with serving() as (instance, _):
        with pytest.raises(ProtocolError, match=what) as refused:
            await TcpPlane(identity).connect(instance, RecordingSink())
        assert "other" not in str(refused.value)
        assert instance.name in str(refused.value)
        assert await echoes(instance)


async def test_a_recorded_hello_opens_no_second_connection():
    async with serving() as (instance, _), raw(instance) as client, raw(instance) as thief:
        recorded = handshake.hello(IDENTITY, client.challenge)
        thief.send(recorded)
        assert "deployment secret" in (await thief.receive(HelloReply)).error.message
        client.send(recorded)
        assert (await client.receive(HelloReply)).error is None


@pytest.mark.parametrize("replies", ["wrong proof", "old wire", "nothing", "closes"])
async def test_a_server_that_is_no_worker_of_ours(replies):
    async def serve(reader, writer):
        version = WIRE_VERSION + 9 if replies == "old wire" else WIRE_VERSION
        if replies != "nothing":
            writer.write(CODEC.encode(Challenge(version=version, nonce=b"n" * 16)))
        if replies == "wrong proof":
            reply = HelloReply(wire_version=WIRE_VERSION, hash_version=HASH_VERSION, proof=b"p" * 32)
            writer.write(CODEC.encode(reply))
        if replies != "closes":
            told.append(bool(await reader.read()))
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        served.set()

    told: list[bool] = []
    served = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    instance = scripted_instance(f"tcp://127.0.0.1:{port}")
    kind = ProtocolError if replies in {"wrong proof", "old wire"} else WorkerLost
    with pytest.raises(kind) as error:
        await TcpPlane(IDENTITY, config=PlaneConfig(connect_timeout_s=0.2)).connect(instance, RecordingSink())
    assert error.value.message
    await served.wait()
    assert replies != "old wire" or told == [True], "it gets the hello, and can say why as well"
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    "garbage",
    [
        (5).to_bytes(LENGTH_BYTES, "little") + b"\xc1\xc1\xc1\xc1\xc1",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        (1 << 31).to_bytes(LENGTH_BYTES, "little"),
        CODEC.encode(Submit(request=scripted_request("echo", [1]))).replace(b"echo", b"\xff\xfe\xfd\xfc"),
        CODEC.encode(Deltas(deltas=())),
    ],
)
async def test_garbage_ends_that_connection_and_no_other(garbage):
    async with serving() as (instance, worker), raw(instance) as client, raw(instance) as bystander:
        assert (await bystander.greet()).error is None
        assert (await client.greet()).error is None
        client.writer.write(garbage)
        with capture_logs() as logs:
            await client.ended()
        assert [log["event"] for log in logs if log["log_level"] == "warning"] == ["connection_refused"]
        bystander.send(Submit(request=scripted_request("echo", [1], request_id="b")))
        assert (await bystander.receive(Deltas)).deltas[0].request_id == "b"
        assert worker.stats().connected == 2
        assert worker.stats().disconnected == 1


async def test_garbage_before_hello():
    async with serving() as (instance, worker):
        for garbage in (b"\x00" * 64, CODEC.encode(Subscribe())):
            async with raw(instance) as client:
                client.writer.write(garbage)
                await client.ended()
        assert worker.stats().connected == 0
        assert await echoes(instance)


async def test_an_unauthenticated_client_may_not_send_much():
    async with serving() as (instance, worker), raw(instance) as client:
        client.writer.write((8000).to_bytes(LENGTH_BYTES, "little"))
        await client.ended()
        async with raw(instance) as friend:
            await friend.greet()
            friend.send(Submit(request=scripted_request("echo", [1, *range(5000)])))
            assert (await friend.receive(Deltas)).deltas
        assert worker.stats().connected == 1


async def test_connections_are_bounded():
    async with serving(PlaneConfig(connections_max=1)) as (instance, _), raw(instance) as first:
        assert (await first.greet()).error is None
        with pytest.raises(WorkerLost):
            await TcpPlane(IDENTITY).connect(instance, RecordingSink())
        await first.close()
        is_admitted = False
        while not is_admitted:
            with suppress(WorkerLost):
                is_admitted = await echoes(instance)


async def test_what_a_frontend_sends_is_bounded():
    async with serving() as (instance, _):
        config = PlaneConfig(frame_bytes_max=4096, requests_max=2)
        connection = await TcpPlane(IDENTITY, config=config).connect(instance, RecordingSink())
        with pytest.raises(RequestError, match="frame_bytes_max") as error:
            connection.submit(scripted_request("echo", range(2000)))
        assert error.value.http_status == 413
        for name in ("a", "b"):
            connection.submit(scripted_request("silence", request_id=name))
        with pytest.raises(Overloaded, match="requests_max"):
            connection.submit(scripted_request("echo", [1], request_id="c"))
        connection.abort("a")
        connection.submit(scripted_request("echo", [1], request_id="c"))
        await connection.close()


async def test_a_worker_that_does_not_read_costs_a_frontend_little():
    config = PlaneConfig(connection_bytes_max=1 << 20)
    async with Scene(TcpPlaneHarness(config)) as scene:
        os.kill(scene.instance.pid, signal.SIGSTOP)
        try:
            refused = None
            for i in range(1000):
                request = scripted_request("silence", range(10_000), request_id=f"r{i}")
                try:
                    scene.connection.submit(request)
                except Backlogged as error:
                    refused = error
                    break
                await asyncio.sleep(0)
            assert "connection_bytes_max" in refused.message
            room = asyncio.Event()
            refused.tell(room.set)
            assert not room.is_set()
        finally:
            os.kill(scene.instance.pid, signal.SIGCONT)
        async with asyncio.timeout(10):
            await room.wait()
        scene.connection.submit(scripted_request("silence", range(10_000), request_id="next"))


async def test_a_worker_that_hangs_is_lost_by_its_silence():
    config = PlaneConfig(heartbeat_interval_s=0.1, heartbeat_timeout_s=0.4)
    async with Scene(TcpPlaneHarness(config)) as scene:
        os.kill(scene.instance.pid, signal.SIGSTOP)
        try:
            await scene.sink.until(lambda: bool(scene.sink.losses))
        finally:
            os.kill(scene.instance.pid, signal.SIGCONT)
        assert "heartbeat_timeout_s" in scene.sink.losses[0][1].message


async def test_a_frontend_that_reads_nothing_costs_a_worker_little_and_delays_nobody():
    events = EventConfig(replay_batches_max=256)  # the ring's own growth is not what is measured
    async with Scene(TcpPlaneHarness(None, events)) as scene, raw(scene.instance) as stalled:
        identity = Identity(secret=SECRET)
        assert (await stalled.greet(identity)).error is None
        before = await scene.stats()
        stalled.send(Subscribe())
        for i in range(20):
            request = scripted_request("count", request_id=f"s{i}", max_tokens=10**6, tokens_per_step=500)
            stalled.send(Submit(request=request))
        await stalled.writer.drain()
        aborted = turns = 0
        while aborted < 20:
            publish = scripted_request("publish", range(100), request_id=f"p{turns}")
            scene.connection.submit(publish)
            await scene.sink.finished(publish.request_id)
            stats = await scene.stats()
            assert stats.rss_kib - before.rss_kib < 8 * 1024
            aborted, turns = stats.aborted, turns + 1
        # Once it reads again, its requests give what was held, then can go on; and its events have no gap.
        stalled.send(Grant(grants=tuple((f"s{i}", 10**6) for i in range(20))))
        last, sequences = {}, []
        while len(last) < 20:
            frame = await stalled.receive((Deltas, Event))
            if isinstance(frame, Event):
                sequences.append(frame.message.sequence)
                continue
            for delta in frame.deltas:
                if delta.finish_reason is not None:
                    last[delta.request_id] = delta
        assert {delta.error.code for delta in last.values()} == {"parked"}
        while not sequences or sequences[-1] < 100:
            sequences.append((await stalled.receive(Event)).message.sequence)
        assert sequences == sorted(sequences)


async def test_an_event_of_a_newer_kind_brings_a_snapshot():
    async with serving() as (instance, worker):
        sink = RecordingSink()
        connection = await TcpPlane(IDENTITY).connect(instance, sink)
        connection.subscribe(None)
        await sink.until(lambda: len(sink.events) == 1)
        message = {"type": "batch", "sequence": 1, "events": [{"type": "moved", "to": "the moon"}]}
        payload = msgspec.msgpack.encode({"type": "event", "message": message})
        frame = len(payload).to_bytes(LENGTH_BYTES, "little") + payload
        (frontend,) = worker._sinks
        frontend.channel.write(frame)
        frontend.channel.write(frame)
        await sink.until(lambda: len(sink.events) == 2)
        assert sink.events[1].last
        assert connection.channel.unknown_frames == 2
        await connection.close()


async def test_unix_sockets(tmp_path):
    listen = f"unix://{tmp_path}/worker.sock"
    plane = TcpPlane(WORKER_IDENTITY, listen=listen)
    server = await plane.serve(ScriptedWorker())
    assert server.address == listen
    assert (tmp_path / "worker.sock").stat().st_mode & 0o777 == 0o600
    assert await echoes(scripted_instance(listen, worker_id=7))
    with pytest.raises(ConfigError, match="another process listens there"):
        await plane.serve(ScriptedWorker())
    await server.close()
    assert not (tmp_path / "worker.sock").exists()


async def test_a_socket_left_by_a_dead_process_is_replaced(tmp_path):
    harness = TcpPlaneHarness(listen=f"unix://{tmp_path}/worker.sock")
    async with harness:
        instance = await harness.start_worker()
        await harness.kill(instance)
        assert (tmp_path / "worker.sock").exists()
        again = await harness.start_worker()
        assert await echoes(again, Identity(secret=SECRET))


async def test_a_port_in_use_is_a_clear_error():
    async with serving() as (instance, _):
        with pytest.raises(ConfigError, match=r"cannot listen: .*in use"):
            await TcpPlane(IDENTITY, listen=instance.address).serve(ScriptedWorker())


async def test_an_advertised_host_is_what_others_connect_to():
    plane = TcpPlane(IDENTITY, listen="tcp://0.0.0.0:0", advertise_host="localhost")
    server = await plane.serve(ScriptedWorker())
    assert server.address.startswith("tcp://localhost:")
    assert await echoes(scripted_instance(server.address))
    await server.close()
