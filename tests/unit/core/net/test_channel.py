"""A channel on a transport that only notes what is done to it, and on virtual time."""

import asyncio

import pytest
from structlog.testing import capture_logs

from penstock.core.errors import ProtocolError
from penstock.core.net.channel import FrameChannel
from penstock.core.net.framing import LENGTH_BYTES, FrameReader, Goodbye, Ping, Pong
from penstock.runtime.requests.frames import CODEC, Abort, Subscribe
from penstock.sim.loop.loop import run_virtual


class Transport(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.written = []
        self.writes = 0
        self.buffered = 0
        self.ends = []

    def set_write_buffer_limits(self, high=None, low=None):
        self.high = high

    def get_write_buffer_size(self):
        return self.buffered

    def write(self, data):
        self.writes += 1
        reader = FrameReader(1 << 20)
        self.written += [CODEC.decode(payload) for payload in reader.feed(data)]

    def close(self):
        self.ends.append("close")

    def abort(self):
        self.ends.append("abort")


class Handler:
    def __init__(self):
        self.messages, self.unknown, self.closed, self.rooms = [], [], [], 0
        self.error = None

    def channel_opened(self):
        pass

    def message_received(self, message):
        if self.error is not None:
            raise self.error
        self.messages.append(message)

    def unknown_received(self, tag):
        self.unknown.append(tag)

    def channel_writable(self):
        self.rooms += 1

    def channel_closed(self, reason):
        self.closed.append(reason)


class Stage:
    def __init__(self):
        self.transport, self.handler = Transport(), Handler()
        self.channel = FrameChannel(
            CODEC,
            self.handler,
            frame_bytes_max=1000,
            write_buffer_bytes=100,
            write_bytes_max=500,
            heartbeat_interval_s=1,
            heartbeat_timeout_s=4,
        )
        self.channel.connection_made(self.transport)

    def receive(self, *messages):
        self.channel.data_received(b"".join(CODEC.encode(message) for message in messages))


def run_scenario(scenario):
    async def main():
        stage = Stage()
        await scenario(stage)
        if not stage.handler.closed:
            stage.channel.connection_lost(None)

    run_virtual(main())


def test_messages_go_in_and_out():
    async def scenario(stage):
        assert stage.transport.high == 100
        stage.channel.send(Subscribe())
        stage.receive(Abort(request_id="a"), Abort(request_id="b"))
        assert stage.transport.written == [Subscribe()]
        assert stage.handler.messages == [Abort(request_id="a"), Abort(request_id="b")]

    run_scenario(scenario)


def test_messages_sent_soon_go_with_the_next_one_or_at_the_end_of_the_turn():
    first, second, third = (Abort(request_id=name) for name in "abc")

    async def scenario(stage):
        stage.channel.send_soon(first)
        stage.channel.send_soon(second)
        assert stage.transport.written == []
        stage.channel.send(third)
        assert (stage.transport.written, stage.transport.writes) == ([first, second, third], 1)
        stage.channel.send_soon(first)
        await asyncio.sleep(0)
        assert (stage.transport.written[3:], stage.transport.writes) == ([first], 2)
        stage.channel.send_soon(second)
        stage.channel.close("done")
        assert stage.transport.written[4:] == [second, Goodbye(reason="done")]
        stage.channel.send_soon(third)
        await asyncio.sleep(0)
        assert stage.transport.written[6:] == []

    run_scenario(scenario)


def test_many_bytes_do_not_wait_for_the_end_of_the_turn():
    async def scenario(stage):
        for number in range(1000):
            stage.channel.send_soon(Abort(request_id=f"{number:030}"))
        assert 900 > len(stage.transport.written) > 400
        await asyncio.sleep(0)
        assert len(stage.transport.written) == 1000

    run_scenario(scenario)


def test_a_ping_is_answered_and_a_silent_peer_is_pinged_and_then_given_up():
    async def scenario(stage):
        stage.receive(Ping())
        assert stage.transport.written == [Pong()]
        stage.transport.written.clear()
        await asyncio.sleep(3.5)
        assert stage.transport.written == [Ping()] * 3
        stage.receive(Pong())
        await asyncio.sleep(3.9)
        assert stage.transport.ends == []
        await asyncio.sleep(1.5)
        assert stage.transport.ends == ["abort"]
        stage.channel.connection_lost(None)
        assert "silent for 4" in stage.handler.closed[0]
        assert stage.handler.messages == []

    run_scenario(scenario)


def test_silence_is_noticed_when_its_time_is_up_and_not_at_the_next_beat():
    async def scenario(stage):
        await asyncio.sleep(0.3)
        stage.receive(Pong())
        await asyncio.sleep(3.99)
        assert stage.transport.ends == []
        await asyncio.sleep(0.02)
        assert stage.transport.ends == ["abort"]

    run_scenario(scenario)


def test_a_peer_that_speaks_is_not_pinged():
    async def scenario(stage):
        for _ in range(20):
            await asyncio.sleep(0.5)
            stage.receive(Abort(request_id="a"))
        assert stage.transport.written == []

    run_scenario(scenario)


def test_time_in_which_this_process_stood_still_is_not_the_peers():
    async def scenario(stage):
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0.5)
        stage.channel._beat_at_s -= 60  # as if the beat came a minute late
        stage.channel._heard_s -= 60
        await asyncio.sleep(1)
        assert stage.transport.ends == []
        await asyncio.sleep(10)
        assert stage.transport.ends == ["abort"], f"at {loop.time()}: from then on its silence counts"

    run_scenario(scenario)


def test_a_frame_longer_than_the_bound_does_not_end_the_connection():
    async def scenario(stage):
        stage.channel.pause_writing()  # as the transport does while it takes the frame
        long = Abort(request_id="a" * 5000)
        stage.channel.send(long)
        stage.transport.buffered = len(CODEC.encode(long))
        stage.channel.send(Subscribe())
        assert stage.transport.ends == []
        stage.transport.buffered += 501
        assert stage.channel.backlog_bytes == 501
        stage.channel.send(Subscribe())
        assert stage.transport.ends == ["abort"]

    run_scenario(scenario)


def test_a_full_buffer_is_said_and_bounded():
    async def scenario(stage):
        assert stage.channel.writable
        stage.channel.pause_writing()
        assert not stage.channel.writable
        stage.transport.buffered = 400
        stage.receive(Ping())
        assert stage.transport.written == [], "who does not read is not answered"
        stage.channel.send(Subscribe())
        stage.channel.resume_writing()
        assert stage.channel.writable
        assert stage.handler.rooms == 1
        stage.channel.pause_writing()
        stage.transport.buffered = 501
        stage.channel.send(Subscribe())
        assert stage.transport.ends == ["abort"]
        assert stage.transport.written == [Subscribe()]

    run_scenario(scenario)


def test_closing_says_goodbye_once():
    async def scenario(stage):
        stage.channel.close("done")
        stage.channel.close("done")
        stage.channel.send(Subscribe())
        assert stage.transport.written == [Goodbye(reason="done")]
        assert stage.transport.ends == ["close"]
        assert not stage.channel.is_open
        stage.channel.resume_writing()
        assert stage.handler.rooms == 0
        stage.channel.connection_lost(None)
        assert stage.handler.closed == ["closed"]
        assert stage.channel.closed.is_set()
        stage.channel.abort("too late")

    run_scenario(scenario)


def test_who_reads_no_goodbye_is_given_up():
    """It may go on to speak, which shows that it lives, and would keep this end open for ever."""

    async def scenario(stage):
        stage.channel.close("done")
        for _ in range(7):
            await asyncio.sleep(0.5)
            stage.receive(Ping())
        assert stage.transport.ends == ["close"]
        await asyncio.sleep(1)
        assert stage.transport.ends == ["close", "abort"]

    run_scenario(scenario)


def test_a_goodbye_is_the_reason():
    async def scenario(stage):
        stage.receive(Goodbye(reason="draining"))
        assert stage.channel.said_goodbye
        stage.channel.connection_lost(None)
        assert stage.handler.closed == ["it said goodbye: draining"]

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("error", "log", "reason"),
    [
        (ProtocolError("no such thing"), "connection_refused", "no such thing"),
        (ValueError("a bug"), "message_failed", "an internal error, see the log"),
    ],
)
def test_a_handler_that_fails_ends_the_connection(error, log, reason):
    async def scenario(stage):
        stage.handler.error = error
        with capture_logs() as logs:
            stage.receive(Abort(request_id="a"), Abort(request_id="b"))
        assert [entry["event"] for entry in logs] == [log]
        assert stage.transport.ends == ["abort"]
        stage.channel.connection_lost(None)
        assert stage.handler.closed == [reason]

    run_scenario(scenario)


def test_unknown_frames_are_counted_and_logged_once():
    async def scenario(stage):
        payload = b"\x81\xa4type\xa3new"
        frame = len(payload).to_bytes(LENGTH_BYTES, "little") + payload
        with capture_logs() as logs:
            stage.channel.data_received(frame * 3)
        assert stage.channel.unknown_frames == 3
        assert stage.handler.unknown == ["new"] * 3
        assert len(logs) == 1

    run_scenario(scenario)
