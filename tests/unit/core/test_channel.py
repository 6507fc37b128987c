"""A channel on a transport that only notes what is done to it, and on virtual time."""

import asyncio
import time

import pytest
from structlog.testing import capture_logs

from penstock.core.channel import FrameChannel
from penstock.core.errors import ProtocolError
from penstock.core.framing import LENGTH_BYTES, FrameReader, Goodbye, Ping, Pong
from penstock.runtime.requests.outbox import CODEC, Abort, Subscribe

pytestmark = pytest.mark.virtual


class Stage(asyncio.Transport):
    """The transport of a channel, and its handler: both note."""

    def __init__(self, **config):
        super().__init__()
        self.written, self.ends = [], []
        self.writes = self.buffered = self.rooms = 0
        self.messages, self.unknown, self.reasons = [], [], []
        self.error = None
        bounds = {"frame_bytes_max": 1000, "write_buffer_bytes": 100, "write_bytes_max": 500}
        beats = {"heartbeat_interval_s": 1, "heartbeat_timeout_s": 4}
        self.channel = FrameChannel(CODEC, self, **bounds | beats | config)
        self.channel.connection_made(self)

    def receive(self, *messages):
        self.channel.data_received(b"".join(CODEC.encode(message) for message in messages))

    def set_write_buffer_limits(self, high=None, low=None):
        self.high = high

    def get_write_buffer_size(self):
        return self.buffered

    def write(self, data):
        self.writes += 1
        self.written += map(CODEC.decode, FrameReader(1 << 20).feed(data))

    def close(self):
        self.ends.append("close")

    def abort(self):
        self.ends.append("abort")

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
        self.reasons.append(reason)


async def test_messages_sent_soon_go_with_the_next_one_or_at_the_end_of_the_turn():
    first, second, third = (Abort(request_id=name) for name in "abc")
    stage = Stage()
    stage.channel.send_soon(first)
    stage.channel.send_soon(second)
    assert stage.written == []
    stage.channel.send(third)
    assert (stage.written, stage.writes) == ([first, second, third], 1)
    stage.channel.send_soon(first)
    await asyncio.sleep(0)
    assert (stage.written[3:], stage.writes) == ([first], 2)
    stage.channel.send_soon(second)
    stage.channel.close("done")
    assert stage.written[4:] == [second, Goodbye(reason="done")]
    stage.channel.send_soon(third)
    await asyncio.sleep(0)
    assert stage.written[6:] == []


async def test_a_ping_is_answered_and_a_silent_peer_is_pinged_and_then_given_up():
    stage = Stage()
    stage.receive(Ping())
    assert stage.written == [Pong()]
    stage.written.clear()
    await asyncio.sleep(3.5)
    assert stage.written == [Ping()] * 3
    stage.receive(Pong())
    await asyncio.sleep(3.9)
    assert stage.ends == []
    await asyncio.sleep(1.5)
    assert stage.ends == ["abort"]
    stage.channel.connection_lost(None)
    assert "silent for 4" in stage.reasons[0]
    assert stage.messages == []


async def test_silence_is_noticed_when_its_time_is_up_and_not_at_the_next_beat():
    stage = Stage()
    await asyncio.sleep(0.3)
    stage.receive(Pong())
    await asyncio.sleep(3.99)
    assert stage.ends == []
    await asyncio.sleep(0.02)
    assert stage.ends == ["abort"]


async def test_a_frame_longer_than_the_bound_does_not_end_the_connection():
    stage = Stage()
    stage.channel.pause_writing()  # as the transport does while it takes the frame
    long = Abort(request_id="a" * 5000)
    stage.channel.send(long)
    stage.buffered = len(CODEC.encode(long))
    stage.channel.send(Subscribe())
    assert stage.ends == []
    stage.buffered += 501
    assert stage.channel.backlog_bytes == 501
    stage.channel.send(Subscribe())
    assert stage.ends == ["abort"]


async def test_a_full_buffer_is_said_and_bounded():
    stage = Stage()
    assert stage.channel.writable
    stage.channel.pause_writing()
    assert not stage.channel.writable
    stage.buffered = 400
    stage.receive(Ping())
    assert stage.written == [], "who does not read is not answered"
    stage.channel.send(Subscribe())
    stage.channel.resume_writing()
    assert stage.channel.writable
    assert stage.rooms == 1
    stage.channel.pause_writing()
    stage.buffered = 501
    stage.channel.send(Subscribe())
    assert stage.ends == ["abort"]
    assert stage.written == [Subscribe()]


async def test_who_reads_no_goodbye_is_given_up():
    """It may go on to speak, which shows that it lives, and would keep this end open for ever."""
    stage = Stage()
    stage.channel.close("done")
    for _ in range(7):
        await asyncio.sleep(0.5)
        stage.receive(Ping())
    assert stage.ends == ["close"]
    await asyncio.sleep(1)
    assert stage.ends == ["close", "abort"]


@pytest.mark.parametrize(
    ("error", "log", "reason"),
    [
        (ProtocolError("no such thing"), "connection_refused", "no such thing"),
        (ValueError("a bug"), "message_failed", "an internal error, see the log"),
    ],
)
async def test_a_handler_that_fails_ends_the_connection(error, log, reason):
    stage = Stage()
    stage.error = error
    with capture_logs() as logs:
        stage.receive(Abort(request_id="a"), Abort(request_id="b"))
    assert [entry["event"] for entry in logs] == [log]
    assert stage.ends == ["abort"]
    stage.channel.connection_lost(None)
    assert stage.reasons == [reason]


async def test_unknown_frames_are_counted_and_logged_once():
    stage = Stage()
    payload = b"\x81\xa4type\xa3new"
    frame = len(payload).to_bytes(LENGTH_BYTES, "little") + payload
    with capture_logs() as logs:
        stage.channel.data_received(frame * 3)
    assert stage.channel.unknown_frames == 3
    assert stage.unknown == ["new"] * 3
    assert len(logs) == 1


def test_time_in_which_this_process_stood_still_is_not_the_peers():
    async def main():
        stage = Stage(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.2)
        time.sleep(0.5)  # noqa: ASYNC251 - the point: a step of this process that holds the loop
        await asyncio.sleep(0.01)
        assert stage.ends == []
        while not stage.ends:  # noqa: ASYNC110 - from then on its silence counts
            await asyncio.sleep(0.01)

    asyncio.run(main())
