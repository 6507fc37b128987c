"""Messages between the leader (node 0) of a worker over several nodes and its followers."""

from penstock.core.errors import ErrorInfo
from penstock.core.net.channel import ChannelHandler, FrameChannel
from penstock.core.net.framing import FrameCodec, Goodbye, Ping, Pong
from penstock.core.net.handshake import Challenge
from penstock.core.wire import Wire
from penstock.runtime.handshake import Hello, HelloReply

FRAME_BYTES_MAX = 1 << 20
HEARTBEAT_S, SILENT_S = 3.0, 15.0
"""A node that is silent for `SILENT_S` is lost; one whose connection ends is lost at once."""
JOIN_S = 60.0
"""Longest wait of a node for the others. After it the node logs which are missing, and tries again."""


class Join(Wire, frozen=True, tag="join"):
    """Ask the leader to admit a follower.

    Attributes:
        rank: of the follower, from 1.
        arguments: engine arguments as JSON, which must be equal on all nodes.
    """

    rank: int
    arguments: bytes


class Joined(Wire, frozen=True, tag="joined"):
    """Answer to `Join`; `error` says why the follower is refused, None if it is admitted."""

    error: ErrorInfo | None = None


class Start(Wire, frozen=True, tag="start"):
    """All nodes have joined: start the engine with this `master_port` on the leader."""

    master_port: int


class Leaving(Wire, frozen=True, tag="leaving"):
    """A follower is shutting down. It ends once the leader has closed the connection."""


Message = Challenge | Hello | HelloReply | Join | Joined | Start | Leaving | Ping | Pong | Goodbye

CODEC: FrameCodec[Message] = FrameCodec(Message)


def node_channel(
    handler: ChannelHandler[Message], frame_bytes_max: int = FRAME_BYTES_MAX
) -> FrameChannel[Message]:
    """Make one side's channel; it accepts frames of up to `frame_bytes_max`."""
    return FrameChannel(
        CODEC,
        handler,
        frame_bytes_max=frame_bytes_max,
        write_buffer_bytes=64 << 10,
        write_bytes_max=FRAME_BYTES_MAX,
        heartbeat_interval_s=HEARTBEAT_S,
        heartbeat_timeout_s=SILENT_S,
    )
