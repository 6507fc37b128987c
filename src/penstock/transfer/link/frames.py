"""What two agents say to each other over a link, the first three frames of which show that each may."""

from penstock.core.errors import ErrorInfo
from penstock.core.net.framing import FrameCodec, Goodbye, Ping, Pong
from penstock.core.net.handshake import Challenge
from penstock.core.wire import Wire

FRAME_BYTES_MAX = 16 << 20
NOTIFICATION_BYTES_MAX = 1 << 20


class Greeting(Wire, frozen=True, tag="greeting"):
    """The initiator's answer: who it is, and proof that it was given the metadata and knows the secret."""

    version: int
    nonce: bytes
    proof: bytes
    name: str
    host: bytes = b""


class Welcome(Wire, frozen=True, tag="welcome"):
    """The listening side's answer: its own proof, and a number that names the link to streams; or why not."""

    proof: bytes = b""
    link_id: int = 0
    error: ErrorInfo | None = None


class TransportMessage(Wire, frozen=True, tag="transport"):
    """What one side's transport says to the other's of the same name."""

    transport: str
    payload: bytes


class Notification(Wire, frozen=True, tag="notification"):
    """What the sender's user says to the receiver's."""

    payload: bytes


class Withdrawn(Wire, frozen=True, tag="withdrawn"):
    """The sender's region is gone: forget it, and say when nothing here uses it any more."""

    region_id: int


class WithdrawnDone(Wire, frozen=True, tag="withdrawn_done"):
    """The answer to `Withdrawn`."""

    region_id: int


LinkFrame = (
    Challenge
    | Greeting
    | Welcome
    | TransportMessage
    | Notification
    | Withdrawn
    | WithdrawnDone
    | Ping
    | Pong
    | Goodbye
)


def link_codec() -> FrameCodec[LinkFrame]:
    return FrameCodec(LinkFrame)
