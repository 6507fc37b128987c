"""The messages of a request-plane connection; `penstock.core.net.framing` encodes and decodes them."""

from penstock.core.errors import ErrorInfo, RequestError
from penstock.core.ids import RequestId
from penstock.core.net.channel import Codec
from penstock.core.net.framing import FrameCodec, Goodbye, Ping, Pong
from penstock.core.net.handshake import Challenge
from penstock.core.types.changes import WorkerChange
from penstock.core.types.events import EventMessage, Holder
from penstock.core.types.kv.actions import KvAction, KvReport
from penstock.core.types.load import PeerCount, TenantCounts, WorkerLoad
from penstock.core.types.media import ExpandedPrompt, MediaPrompt
from penstock.core.types.requests import Delta, Prefetch, Request
from penstock.core.wire import Wire
from penstock.runtime.config import PlaneConfig
from penstock.runtime.handshake import Hello, HelloReply
from penstock.runtime.session import SessionProtocol


class Submit(Wire, frozen=True, tag="submit"):
    request: Request


class PrefetchKv(Wire, frozen=True, tag="prefetch"):
    prefetch: Prefetch


class Abort(Wire, frozen=True, tag="abort"):
    request_id: RequestId


class Grant(Wire, frozen=True, tag="grant"):
    """(request id, tokens) that the readers have consumed since the last grant."""

    grants: tuple[tuple[RequestId, int], ...]


class Subscribe(Wire, frozen=True, tag="subscribe"):
    """Send the KV events of a holder after this sequence (None: a snapshot), and all later ones."""

    after_sequence: int | None = None
    holder: Holder = Holder.WORKER


class Unsubscribe(Wire, frozen=True, tag="unsubscribe"):
    """Send no more KV events of a holder."""

    holder: Holder


class Fetch(Wire, frozen=True, tag="fetch"):
    fetch_id: int
    sha256: str


class FetchChunk(Wire, frozen=True, tag="fetch_chunk"):
    """The next bytes of a file, or an error."""

    fetch_id: int
    data: bytes = b""
    last: bool = False
    error: ErrorInfo | None = None


class Change(Wire, frozen=True, tag="change"):
    """Change the worker; `Changed` answers, perhaps much later."""

    call_id: int
    change: WorkerChange | KvAction


class Changed(Wire, frozen=True, tag="changed"):
    """The change is made, or `error` says why not. `report` answers an action on the KV cache."""

    call_id: int
    error: ErrorInfo | None = None
    report: KvReport | None = None


class ExpandMedia(Wire, frozen=True, tag="expand_media"):
    """Expand the media of a prompt; `MediaExpanded` answers."""

    call_id: int
    prompt: MediaPrompt


class MediaExpanded(Wire, frozen=True, tag="media_expanded"):
    """The expanded prompt, or why the engine does not take its media."""

    call_id: int
    error: ErrorInfo | None = None
    prompt: ExpandedPrompt | None = None


class CountTenants(Wire, frozen=True, tag="count_tenants"):
    """What a frontend's tenants have used; `TenantsCounted` answers. A worker of an older version does not."""

    call_id: int
    counts: TenantCounts


class TenantsCounted(Wire, frozen=True, tag="tenants_counted"):
    """What tenants have used at other frontends, by name."""

    call_id: int
    peers: tuple[tuple[str, PeerCount], ...]


class Deltas(Wire, frozen=True, tag="deltas"):
    """All deltas of one engine step for one frontend."""

    deltas: tuple[Delta, ...]


class Load(Wire, frozen=True, tag="load"):
    load: WorkerLoad


class Event(Wire, frozen=True, tag="event"):
    message: EventMessage


Frame = (
    Challenge | Hello | HelloReply | Submit | PrefetchKv | Abort | Grant | Subscribe | Unsubscribe | Fetch | FetchChunk
    | Deltas | Load | Event | Change | Changed | ExpandMedia | MediaExpanded | CountTenants | TenantsCounted
    | Ping | Pong | Goodbye
)  # fmt: skip

CODEC: FrameCodec[Frame] = FrameCodec(Frame, lenient_tags=("event",))
"""A KV event of an unknown kind does not end the connection: the subscriber requests a snapshot instead."""


def request_protocol(config: PlaneConfig, codec: Codec[Frame] = CODEC) -> SessionProtocol[Frame]:
    return SessionProtocol(
        codec=codec,
        server="worker",
        client="frontend",
        frame_bytes_max=config.frame_bytes_max,
        write_bytes_max=2 * config.connection_bytes_max,
        heartbeat_interval_s=config.heartbeat_interval_s,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        connect_timeout_s=config.connect_timeout_s,
        connections_max=config.connections_max,
        write_buffer_bytes=config.write_buffer_bytes,
    )


UNENCODABLE = (OverflowError, TypeError, ValueError)
"""Exceptions of encoding a message with a number or text that msgpack cannot represent."""


def cannot_be_sent(request: Request | Prefetch, error: Exception) -> RequestError:
    """Make the error for a request that cannot be encoded."""
    return RequestError(
        f"request {request.request_id!r}: cannot be sent: {error}; integers must fit into 64 bits and "
        "text must be valid Unicode"
    )
