"""The frontend's end of a connection to one worker, shared by all its requests."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count

import msgspec

from penstock.core.errors import (
    Backlogged,
    ErrorInfo,
    Overloaded,
    PenstockError,
    ProtocolError,
    RequestError,
    WorkerLost,
    from_info,
)
from penstock.core.framing import Challenge
from penstock.core.ids import RequestId, WorkerId
from penstock.core.log import get_logger
from penstock.core.types.events import EventMessage, Holder
from penstock.core.types.instances import Instance, WorkerChange
from penstock.core.types.kv import KvAction, KvReport
from penstock.core.types.load import PeerCount, TenantCount, WorkerLoad
from penstock.core.types.requests import ExpandedPrompt, MediaPrompt, Prefetch, Request
from penstock.runtime.config import PlaneConfig
from penstock.runtime.handshake import Hello, Identity, hello
from penstock.runtime.requests.direct_deltas import DirectDeltas, Grants
from penstock.runtime.requests.outbox import (
    CODEC,
    UNENCODABLE,
    Abort,
    Calls,
    Change,
    Changed,
    CountTenants,
    Deltas,
    Event,
    ExpandMedia,
    Fetch,
    FetchChunk,
    FileReceiver,
    Frame,
    Grant,
    Load,
    MediaExpanded,
    PrefetchKv,
    Submit,
    Subscribe,
    TenantsCounted,
    Unsubscribe,
    cannot_be_sent,
    request_protocol,
)
from penstock.runtime.session import ClientSession
from penstock.seams import DirectClient, DirectStream, EventCarrier, WorkerSink, WrittenTokens

_log = get_logger()


@dataclass(slots=True)
class _Fetching:
    file: FileReceiver
    content: asyncio.Future[bytes]


class WorkerPeer(ClientSession[Frame]):
    """The `Connection` to one worker. One event loop owns it."""

    def __init__(
        self,
        instance: Instance,
        sink: WorkerSink,
        identity: Identity,
        config: PlaneConfig,
        carrier: EventCarrier | None = None,
    ) -> None:
        """Make a peer that answers the worker's challenge.

        Args:
            instance: the worker.
            sink: gets what arrives.
            identity: of this process.
            config: bounds and times.
            carrier: brings new KV events and load reports; None: the connection does.
        """
        self._grant_tokens = max(1, config.window_tokens // 4)
        self._direct = DirectDeltas(self._grant_tokens, self._written)
        super().__init__(request_protocol(config, self._direct), identity)
        self.entered = False
        """Whether the sink is told when the connection ends."""
        self._instance = instance
        self._sink = sink
        self._config = config
        self._closing = False
        self._ungranted: dict[RequestId, int] = {}  # open requests -> tokens consumed and not granted yet
        self._grants: dict[RequestId, int] = {}  # to send in the next turn of the loop
        self._fetches: dict[int, _Fetching] = {}
        self._fetch_ids = count(1)
        self._calls: Calls[KvReport | None] = Calls()
        self._expansions: Calls[ExpandedPrompt] = Calls()
        self._counts: Calls[Mapping[str, PeerCount]] = Calls()
        self._resync_again_s = 0.0
        self._carrier = carrier
        self._broadcast_key = b"" if carrier is None else secrets.token_bytes(8)
        self._unfollow: Callable[[], None] = lambda: None
        self._followed: set[Holder] = set()
        self._load_number = 0
        self._on_room: list[Callable[[], None]] = []  # called once the write buffer has room

    @property
    def worker_id(self) -> WorkerId:
        return self._instance.worker_id

    async def enter(self) -> None:
        """From now on the sink is told if the connection is lost.

        Raises:
            WorkerLost: the connection ended.
        """
        if not self.channel.is_open:
            raise self._lost("right after the handshake")
        self.entered = True

    def submit(self, request: Request) -> None:
        self._send(request, Submit(request=request))
        self._ungranted[request.request_id] = 0

    def prefetch(self, prefetch: Prefetch) -> None:
        self._send(prefetch, PrefetchKv(prefetch=prefetch))

    def _send(self, request: Request | Prefetch, message: Submit | PrefetchKv) -> None:
        if not self.channel.is_open:
            raise self._lost("before this request")
        if len(self._ungranted) >= self._config.requests_max:
            raise Overloaded(
                f"{self._name}: {len(self._ungranted)} requests are under way on this connection (requests_max); "
                "try another worker"
            )
        try:
            self._write(message, f"request {request.request_id}")
        except UNENCODABLE as error:
            raise cannot_be_sent(request, error) from error

    def _write(self, message: Submit | PrefetchKv | ExpandMedia, what: str) -> None:
        """Send a message that may be long."""
        if self.channel.backlog_bytes > self._config.connection_bytes_max:
            raise Backlogged(
                f"{self._name}: {self.channel.backlog_bytes} bytes wait to be read by it, more than "
                f"{self._config.connection_bytes_max} (connection_bytes_max); try another worker",
                self._on_room.append,
            )
        frame = CODEC.encode(message)
        if len(frame) > self._config.frame_bytes_max:
            raise RequestError(
                f"{what}: {len(frame)} bytes, more than {self._config.frame_bytes_max} (frame_bytes_max); shorten the"
                " prompt, or send smaller media",
                http_status=413,
            )
        self.channel.write(frame)

    def abort(self, request_id: RequestId) -> None:
        self._forget(request_id)
        self.channel.send(Abort(request_id=request_id))

    def grant(self, request_id: RequestId, tokens: int) -> None:
        ungranted = self._ungranted.get(request_id)
        if ungranted is None:
            return  # finished or aborted: nothing more will come
        ungranted += tokens
        if ungranted < self._grant_tokens:
            self._ungranted[request_id] = ungranted
            return
        self._ungranted[request_id] = 0
        if not self._grants:
            asyncio.get_running_loop().call_soon(self._send_grants)
        self._grants[request_id] = self._grants.get(request_id, 0) + ungranted

    def open_direct(self, request_id: RequestId, stream: DirectStream, client: DirectClient) -> bool:
        self._direct.open(request_id, stream, client)
        return True

    def close_direct(self, request_id: RequestId) -> WrittenTokens | None:
        return self._direct.close(request_id)

    def _written(self, tokens: int, grants: Grants) -> None:
        self._sink.written(self.worker_id, tokens)
        if grants:
            self.channel.send(Grant(grants=tuple(grants)))

    def subscribe(self, after_sequence: int | None, holder: Holder = Holder.WORKER) -> None:
        self._followed.add(holder)
        self.channel.send(Subscribe(after_sequence=after_sequence, holder=holder))

    def unsubscribe(self, holder: Holder) -> None:
        self._followed.discard(holder)
        self.channel.send(Unsubscribe(holder=holder))

    async def fetch(self, sha256: str) -> bytes:
        if not self.channel.is_open:
            raise self._lost("before this fetch")
        fetch_id = next(self._fetch_ids)
        content: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._fetches[fetch_id] = _Fetching(FileReceiver(sha256, self._config.file_bytes_max), content)
        self.channel.send(Fetch(fetch_id=fetch_id, sha256=sha256))
        try:
            return await content
        finally:
            self._fetches.pop(fetch_id, None)

    async def change(self, change: WorkerChange | KvAction) -> KvReport | None:
        if not self.channel.is_open:
            raise self._lost("before this change")
        return await self._calls.ask(
            lambda call_id: self.channel.send(Change(call_id=call_id, change=change))
        )

    async def expand_media(self, prompt: MediaPrompt) -> ExpandedPrompt:
        if not self.channel.is_open:
            raise self._lost("before this prompt")
        return await self._expansions.ask(
            lambda call_id: self._write(ExpandMedia(call_id=call_id, prompt=prompt), "media")
        )

    async def count_tenants(self, counts: Mapping[str, TenantCount]) -> Mapping[str, PeerCount]:
        if not self.channel.is_open:
            raise self._lost("before this count")
        return await self._counts.ask(
            lambda call_id: self.channel.send(CountTenants(call_id=call_id, counts=tuple(counts.items())))
        )

    async def close(self) -> None:
        """Close the connection; the worker aborts the frontend's unfinished requests."""
        self._closing = True
        self._unfollow()
        await self.close_gracefully("the frontend closes", self._config.close_timeout_s)

    def hello(self, challenge: Challenge) -> Hello:
        if self._carrier is not None:
            instance = self._instance
            self._unfollow = self._carrier.follow(
                instance.registration, instance.rank, self._broadcast_key, self
            )
        return hello(
            self._identity,
            challenge,
            expected=self._instance.registration,
            window_tokens=self._config.window_tokens,
            rank=self._instance.rank,
            broadcast_key=self._broadcast_key,
        )

    def refusal(self, error: ErrorInfo) -> PenstockError:
        message = f"{self._name} refused the connection: {error.message}"
        return from_info(msgspec.structs.replace(error, message=message))

    def received(self, message: Frame) -> None:
        match message:
            case Deltas(deltas=deltas):
                for delta in deltas:
                    if delta.finish_reason is not None:
                        self._forget(delta.request_id)
                self._sink.push(self.worker_id, deltas)
            case Load(load=load):
                self.push_load(load)
            case Event(message=event):
                self._sink.push_event(self.worker_id, event)
            case FetchChunk():
                self._on_chunk(message)
            case Changed() | MediaExpanded() | TenantsCounted():
                self._on_answer(message)
            case _:
                raise ProtocolError(
                    f"{type(message).__name__}: a worker does not send this; update the older side"
                )

    def _on_answer(self, message: Changed | MediaExpanded | TenantsCounted) -> None:
        match message:
            case Changed(call_id=call_id, error=info, report=report):
                self._calls.answered(call_id, report if info is None else from_info(info))
            case MediaExpanded(call_id=call_id, error=info, prompt=prompt):
                outcome = prompt if info is None else from_info(info)
                if outcome is None:
                    raise ProtocolError("media_expanded: neither a prompt nor an error; the peer is broken")
                self._expansions.answered(call_id, outcome)
            case TenantsCounted(call_id=call_id, peers=peers):
                self._counts.answered(call_id, dict(peers))

    def push_event(self, message: EventMessage) -> None:
        """Take KV events from the carrier, if they were subscribed to."""
        if message.holder in self._followed:
            self._sink.push_event(self.worker_id, message)

    def push_load(self, load: WorkerLoad) -> None:
        """Take a load report, from the connection or the carrier, unless a newer one has come by the other."""
        if load.number >= self._load_number:
            self._load_number = load.number
            self._sink.push_load(self.worker_id, load)

    def unknown_received(self, tag: str) -> None:
        """Request a snapshot after an event of an unknown kind, at most once per heartbeat interval."""
        now = asyncio.get_running_loop().time()
        if tag == "event" and now >= self._resync_again_s:
            self._resync_again_s = now + self._config.heartbeat_interval_s
            self.subscribe(None)

    def channel_writable(self) -> None:
        waiting, self._on_room = self._on_room, []
        for tell in waiting:
            tell()

    def channel_closed(self, reason: str) -> None:
        error = self._lost(reason)
        self.channel_writable()
        self._unfollow()
        self.fail(error)
        for fetching in self._fetches.values():
            if not fetching.content.done():
                fetching.content.set_exception(error)
        self._calls.fail(error)
        self._expansions.fail(error)
        self._counts.fail(error)
        if self.entered and not self._closing:
            self._sink.lost(self.worker_id, error)

    @property
    def _name(self) -> str:
        return f"worker {self._instance.name} ({self.worker_id}) at {self._instance.address}"

    def _lost(self, reason: str) -> WorkerLost:
        return WorkerLost(f"{self._name}: the connection ended: {reason}; try another worker")

    def _forget(self, request_id: RequestId) -> None:
        self._ungranted.pop(request_id, None)
        self._grants.pop(request_id, None)

    def _send_grants(self) -> None:
        if self._grants:
            self.channel.send(Grant(grants=tuple(self._grants.items())))
            self._grants.clear()

    def _on_chunk(self, chunk: FetchChunk) -> None:
        fetching = self._fetches.get(chunk.fetch_id)
        if fetching is None or fetching.content.done():
            return  # the caller has gone
        try:
            if chunk.error is not None:
                raise from_info(chunk.error)
            fetching.file.add(chunk.data)
            if chunk.last:
                fetching.content.set_result(fetching.file.finish())
        except PenstockError as error:
            fetching.content.set_exception(error)
