"""The worker's end of a connection to one frontend: requests, credits, KV events, files."""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

from penstock.core.errors import (
    ErrorInfo,
    Overloaded,
    PenstockError,
    ProtocolError,
)
from penstock.core.ids import RequestId
from penstock.core.log import get_logger
from penstock.core.types.events import EventMessage, Holder
from penstock.core.types.kv import KvReport
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta, ExpandedPrompt
from penstock.runtime.config import PlaneConfig
from penstock.runtime.events.subscriber import EventFeed
from penstock.runtime.handshake import Hello
from penstock.runtime.requests.outbox import (
    FETCHES_MAX,
    Abort,
    Change,
    Changed,
    CountTenants,
    Deltas,
    Event,
    ExpandMedia,
    Fetch,
    FetchChunk,
    Frame,
    Grant,
    Load,
    MediaExpanded,
    Outbox,
    PrefetchKv,
    Submit,
    Subscribe,
    TenantsCounted,
    Unsubscribe,
    chunks,
    missing_file,
)
from penstock.runtime.session import ServerSession, SessionServer
from penstock.seams import WorkerService

_log = get_logger()


class FrontendPeer(ServerSession[Frame]):
    """The `FrontendSink` of one connection. One event loop owns it."""

    def __init__(
        self,
        service: WorkerService,
        config: PlaneConfig,
        server: "SessionServer[FrontendPeer]",
        repair_interval_s: float | None = None,
    ) -> None:
        """Make a peer that waits for the client's hello.

        Args:
            service: the worker.
            config: bounds and times.
            server: has the sessions.
            repair_interval_s: how often a frontend that hears broadcasts is told what it should have; None: there are none.
        """
        super().__init__(server)
        self.process = ""
        self._service = service
        self._config = config
        self._outbox: Outbox | None = None  # None until the client is accepted
        self._load: WorkerLoad | None = None
        self._feeds: dict[Holder, EventFeed] = {}  # those that were asked for
        self._rank = 0
        self._reads: dict[int, asyncio.Future[bytes | None]] = {}
        self._files: deque[tuple[int, Iterator[tuple[bytes, bool]]]] = deque()
        self._finishing: str | None = None
        self._repair_interval_s = repair_interval_s
        self._hears_broadcasts = False
        self._repair: asyncio.TimerHandle | None = None

    @property
    def writable(self) -> bool:
        return self.channel.writable

    def push(self, deltas: Sequence[Delta]) -> None:
        if self._outbox is not None and self.channel.is_open:
            now = self._outbox.offer(deltas, writable=self.channel.writable)
            if now:
                self.channel.send(Deltas(deltas=tuple(now)))

    def push_load(self, load: WorkerLoad) -> None:
        if self.channel.writable:
            self.channel.send_soon(Load(load=load))
        else:
            self._load = load

    def send_event(self, message: EventMessage) -> None:
        self.channel.send_soon(Event(message=message))

    def finish(self, reason: str) -> None:
        """Close once all buffered deltas are sent; the caller sets a timeout."""
        self._finishing = reason
        self._finish_if_idle()

    def check(self, hello: Hello) -> None:
        self._service.check_rank(hello.rank)

    def trusted(self, hello: Hello) -> None:
        self.admit()
        self.process = hello.process
        self._outbox = Outbox(
            window_tokens=hello.window_tokens,
            stream_bytes_max=self._config.stream_bytes_max,
            bytes_max=self._config.connection_bytes_max,
            abort=self._abort_later,
        )
        _log.info("frontend_connected", process=self.process, peer=self.channel.peer)
        self._rank = hello.rank
        self._hears_broadcasts = bool(hello.broadcast_key) and self._repair_interval_s is not None
        self._service.connected(self, hello.rank, hello.broadcast_key if self._hears_broadcasts else b"")
        if self._hears_broadcasts:
            self._repair_broadcasts()

    def refused(self, process: str, error: ErrorInfo) -> None:
        _log.warning("frontend_refused", process=process, peer=self.channel.peer, error=error.message)
        if error.code == ProtocolError.code:
            self._service.refused("refused")

    def received(self, message: Frame) -> None:
        assert self._outbox is not None, "trusted"
        match message:
            case Submit(request=request):
                if len(self._outbox) >= self._config.requests_max:
                    raise ProtocolError(f"more than {self._config.requests_max} requests (requests_max)")
                self._outbox.open(request.request_id)
                self._service.submit(request, self)
            case PrefetchKv(prefetch=prefetch):
                self._service.prefetch(prefetch, self)
            case Grant(grants=grants):
                for request_id, tokens in grants:
                    self._outbox.grant(request_id, tokens)
                self._send_held(self._outbox)
            case Abort(request_id=request_id):
                self._outbox.close(request_id)
                self._service.abort(request_id, self)
            case Subscribe() | Unsubscribe():
                self._on_subscription(message)
            case Fetch():
                self._on_fetch(message)
            case Change() | ExpandMedia() | CountTenants():
                self._on_call(message)
            case _:
                raise ProtocolError(
                    f"{type(message).__name__}: a frontend does not send this; update the older side"
                )

    def _on_call(self, message: Change | ExpandMedia | CountTenants) -> None:
        match message:
            case Change(call_id=call_id, change=change):
                self._service.change(change, partial(self._answer, call_id))
            case ExpandMedia(call_id=call_id, prompt=prompt):
                self._service.expand_media(prompt, partial(self._expanded, call_id))
            case CountTenants(call_id=call_id, counts=counts):
                peers = self._service.count_tenants(dict(counts), self)
                self.channel.send(TenantsCounted(call_id=call_id, peers=tuple(peers.items())))

    def _on_subscription(self, message: Subscribe | Unsubscribe) -> None:
        feed = self._feeds.get(message.holder)
        if isinstance(message, Unsubscribe):
            if feed is not None:
                feed.close()
                del self._feeds[message.holder]
            return
        if feed is None:
            events = self._service.events(self._rank, message.holder)
            feed = EventFeed(events, self, is_live=not self._hears_broadcasts)
            self._feeds[message.holder] = feed
        feed.subscribe(message.after_sequence)

    def channel_writable(self) -> None:
        if self._outbox is not None:
            self._send_held(self._outbox)
        if self._load is not None and self.channel.writable:
            self.channel.send(Load(load=self._load))
            self._load = None
        for feed in self._feeds.values():
            feed.pump()
        self._send_files()

    def ended(self, reason: str) -> None:
        if self._repair is not None:
            self._repair.cancel()
        reads, self._reads = self._reads, {}
        for read in reads.values():
            read.cancel()
        if self._outbox is not None:
            _log.info("frontend_disconnected", process=self.process, peer=self.channel.peer, reason=reason)
            for feed in self._feeds.values():
                feed.close()
            self._service.disconnected(self)

    def _repair_broadcasts(self) -> None:
        """Tell now and then what a frontend should have heard; it asks for what it has not."""
        assert self._repair_interval_s is not None, "it hears broadcasts"
        loop = asyncio.get_running_loop()
        self._repair = loop.call_later(self._repair_interval_s, self._repair_broadcasts)
        for feed in self._feeds.values():
            feed.tell_position()
        self._service.repeat_load(self)

    def _abort_later(self, request_id: RequestId) -> None:
        """Abort in the next turn of the loop, not within the step whose deltas exceeded the bound."""
        asyncio.get_running_loop().call_soon(self._service.abort, request_id, self)

    def _send_held(self, outbox: Outbox) -> None:
        """Send buffered deltas, one write buffer at a time, while the connection has room."""
        while outbox.has_held and self.channel.writable:
            now = outbox.take(self._config.write_buffer_bytes)
            if not now:
                break
            self.channel.send(Deltas(deltas=tuple(now)))
        self._finish_if_idle()

    def _finish_if_idle(self) -> None:
        if self._finishing is not None and not (self._outbox and self._outbox.has_held):
            self.channel.close(self._finishing)

    def _on_fetch(self, fetch: Fetch) -> None:
        if len(self._files) + len(self._reads) >= FETCHES_MAX:
            error = Overloaded(
                f"{FETCHES_MAX} files are on their way on this connection; wait for one of them"
            )
            self._refuse_fetch(fetch, error)
            return
        if fetch.fetch_id in self._reads:
            raise ProtocolError(f"fetch {fetch.fetch_id}: it is under way already; the peer is broken")
        read = self._reads[fetch.fetch_id] = self._service.read_file(fetch.sha256)
        read.add_done_callback(partial(self._on_read, fetch))

    def _on_read(self, fetch: Fetch, read: asyncio.Future[bytes | None]) -> None:
        """Send a file that was read, unless the frontend has gone."""
        if self._reads.pop(fetch.fetch_id, None) is not read or read.cancelled() or not self.channel.is_open:
            return
        content = None if read.exception() is not None else read.result()
        if content is not None:
            self._files.append((fetch.fetch_id, chunks(content)))
            self._send_files()
        elif self.channel.writable:
            self.channel.send(
                FetchChunk(fetch_id=fetch.fetch_id, last=True, error=missing_file(fetch.sha256).to_info())
            )
        else:
            self.channel.abort("the peer does not even read that there is no such file")

    def _answer(self, call_id: int, outcome: PenstockError | KvReport | None) -> None:
        if isinstance(outcome, PenstockError):
            self.channel.send(Changed(call_id=call_id, error=outcome.to_info()))
        else:
            self.channel.send(Changed(call_id=call_id, report=outcome))

    def _expanded(self, call_id: int, outcome: PenstockError | ExpandedPrompt) -> None:
        if isinstance(outcome, PenstockError):
            self.channel.send(MediaExpanded(call_id=call_id, error=outcome.to_info()))
        else:
            self.channel.send(MediaExpanded(call_id=call_id, prompt=outcome))

    def _refuse_fetch(self, fetch: Fetch, error: PenstockError) -> None:
        if not self.channel.writable:
            raise ProtocolError(f"{error.message}; the peer does not even read that")
        self.channel.send(FetchChunk(fetch_id=fetch.fetch_id, last=True, error=error.to_info()))

    def _send_files(self) -> None:
        """Send chunks of all files in turn, while the connection has room."""
        while self._files and self.channel.writable:
            fetch_id, content = self._files.popleft()
            data, last = next(content)
            self.channel.send(FetchChunk(fetch_id=fetch_id, data=data, last=last))
            if not last:
                self._files.append((fetch_id, content))
