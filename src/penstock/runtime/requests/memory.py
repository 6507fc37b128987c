"""The request plane inside one process: the reference implementation, also for tests and simulations.

Messages are encoded and decoded, so that what works here works over a socket. Each is delivered in order in a later turn of
the event loop, so no call re-enters its caller.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import msgspec

from penstock.core.errors import PenstockError, WorkerLost, from_info
from penstock.core.framing import LENGTH_BYTES
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.events import EventMessage, Holder
from penstock.core.types.instances import Instance, WorkerChange
from penstock.core.types.kv import KvAction, KvReport
from penstock.core.types.load import PeerCount, TenantCount, WorkerLoad
from penstock.core.types.requests import Delta, ExpandedPrompt, MediaPrompt, Prefetch, Request
from penstock.core.wire import encode
from penstock.runtime.config import PlaneConfig
from penstock.runtime.requests.direct_deltas import DirectDeltas, Grants
from penstock.runtime.requests.outbox import (
    CODEC,
    UNENCODABLE,
    Calls,
    Deltas,
    FileReceiver,
    Outbox,
    cannot_be_sent,
    missing_file,
)
from penstock.seams import DirectClient, DirectStream, EventSource, WorkerService, WorkerSink, WrittenTokens

_requests = msgspec.msgpack.Decoder(Request)
_prefetches = msgspec.msgpack.Decoder(Prefetch)
_loads = msgspec.msgpack.Decoder(WorkerLoad)
_events = msgspec.msgpack.Decoder(EventMessage)


class MemoryPlane:
    """Connects everything on one event loop."""

    def __init__(self, config: PlaneConfig | None = None) -> None:
        self.config = config or PlaneConfig()
        self._servers: dict[str, MemoryServer] = {}
        self._numbers = count(1)

    async def serve(self, service: WorkerService) -> "MemoryServer":
        server = MemoryServer(self, f"memory://{next(self._numbers)}", service, self.config)
        self._servers[server.address] = server
        return server

    async def connect(self, instance: Instance, sink: WorkerSink) -> "MemoryConnection":
        server = self._servers.get(instance.address)
        if server is None:
            raise WorkerLost(
                f"worker {instance.name}: nobody listens at {instance.address}; it has probably gone: try another"
            )
        server.service.check_rank(instance.rank)
        link = _Link(server, instance, sink)
        server.links.append(link)
        link.later(server.service.connected, link, instance.rank)
        await asyncio.sleep(0)
        return MemoryConnection(link)

    def kill(self, address: str) -> None:
        """Imitate a killed worker process: its frontends' sinks get `lost`, the worker gets nothing."""
        server = self._servers.pop(address, None)
        if server is not None:
            for link in tuple(server.links):
                link.break_off("its process is gone", tell_service=False)


class MemoryServer:
    """A worker's listening end."""

    def __init__(self, plane: MemoryPlane, address: str, service: WorkerService, config: PlaneConfig) -> None:
        self.config = config
        self.address = address
        self.service = service
        self.links: list[_Link] = []
        self._plane = plane

    async def close(self) -> None:
        await asyncio.sleep(0)  # what was pushed before is delivered
        self._plane._servers.pop(self.address, None)
        for link in tuple(self.links):
            link.break_off("it said goodbye", tell_service=True)


class _Link:
    """One connection seen from the worker: its `FrontendSink` and `EventSink`."""

    def __init__(self, server: MemoryServer, instance: Instance, sink: WorkerSink) -> None:
        self.server = server
        self.worker_id = instance.worker_id
        self._rank = instance.rank
        self._events: dict[Holder, EventSource] = {}  # subscribed to
        self.sink = sink
        self.up = True
        self._loop = asyncio.get_running_loop()
        self._load: WorkerLoad | None = None
        self.calls: Calls[KvReport | None] = Calls()
        self.expansions: Calls[ExpandedPrompt] = Calls()
        self.counts: Calls[Mapping[str, PeerCount]] = Calls()
        self.direct = DirectDeltas(max(1, server.config.window_tokens // 4), self._written)
        self._outbox = Outbox(
            window_tokens=server.config.window_tokens,
            stream_bytes_max=server.config.stream_bytes_max,
            bytes_max=server.config.connection_bytes_max,
            abort=lambda request_id: self.later(server.service.abort, request_id, self),
        )

    def later(self, call: Callable[..., None], *args: Any) -> None:
        """Call in the next turn of the loop, unless the link has ended by then."""
        self._loop.call_soon(self._deliver, call, *args)

    def _deliver(self, call: Callable[..., None], *args: Any) -> None:
        if self.up:
            call(*args)

    def push(self, deltas: Sequence[Delta]) -> None:
        now = self._outbox.offer(deltas, writable=self.up)
        if now:
            self.later(self._push, CODEC.encode(Deltas(deltas=tuple(now))))

    def _push(self, frame: bytes) -> None:
        message = self.direct.decode(frame[LENGTH_BYTES:])
        if isinstance(message, Deltas):
            self.sink.push(self.worker_id, message.deltas)

    def _written(self, tokens: int, grants: Grants) -> None:
        self.sink.written(self.worker_id, tokens)
        for request_id, granted in grants:
            self.later(self.grant, request_id, granted)

    def push_load(self, load: WorkerLoad) -> None:
        if self._load is None:
            self.later(self._push_load)
        self._load = load

    def _push_load(self) -> None:
        frame, self._load = encode(self._load), None
        self.sink.push_load(self.worker_id, _loads.decode(frame))

    def push_event(self, message: EventMessage) -> None:
        self.later(self._push_event, encode(message))

    def _push_event(self, frame: bytes) -> None:
        self.sink.push_event(self.worker_id, _events.decode(frame))

    def submit(self, frame: bytes) -> None:
        request = _requests.decode(frame)
        self._outbox.open(request.request_id)
        self.server.service.submit(request, self)

    def prefetch(self, frame: bytes) -> None:
        self.server.service.prefetch(_prefetches.decode(frame), self)

    def abort(self, request_id: RequestId) -> None:
        self._outbox.close(request_id)
        self.server.service.abort(request_id, self)

    def grant(self, request_id: RequestId, tokens: int) -> None:
        self._outbox.grant(request_id, tokens)
        now = self._outbox.take()
        if now:
            self.later(self._push, CODEC.encode(Deltas(deltas=tuple(now))))

    def subscribe(self, after_sequence: int | None, holder: Holder) -> None:
        if holder not in self._events:
            self._events[holder] = self.server.service.events(self._rank, holder)
        for message in self._events[holder].events_after(after_sequence):
            if message is not None:
                self.push_event(message)
        self._events[holder].subscribe(self)

    def unsubscribe(self, holder: Holder) -> None:
        events = self._events.pop(holder, None)
        if events is not None:
            events.unsubscribe(self)

    def change(self, change: WorkerChange | KvAction, call_id: int) -> None:
        self.server.service.change(change, partial(self._answer, call_id))

    def _answer(self, call_id: int, outcome: PenstockError | KvReport | None) -> None:
        heard = from_info(outcome.to_info()) if isinstance(outcome, PenstockError) else outcome
        self.later(self.calls.answered, call_id, heard)

    def expand_media(self, prompt: MediaPrompt, call_id: int) -> None:
        self.server.service.expand_media(prompt, partial(self._expanded, call_id))

    def _expanded(self, call_id: int, outcome: PenstockError | ExpandedPrompt) -> None:
        heard = from_info(outcome.to_info()) if isinstance(outcome, PenstockError) else outcome
        self.later(self.expansions.answered, call_id, heard)

    def count_tenants(self, counts: Mapping[str, TenantCount], call_id: int) -> None:
        self.later(self.counts.answered, call_id, self.server.service.count_tenants(counts, self))

    def break_off(self, why: str, *, tell_service: bool) -> None:
        if self.up:
            self._loop.call_soon(self.sink.lost, self.worker_id, self._lost(why))
        self.hang_up(tell_service=tell_service)

    def hang_up(self, *, tell_service: bool) -> None:
        if not self.up:
            return
        self.up = False
        self.server.links.remove(self)
        self.calls.fail(self._lost("it was closed"))
        self.expansions.fail(self._lost("it was closed"))
        self.counts.fail(self._lost("it was closed"))
        if tell_service:
            for holder in tuple(self._events):
                self.unsubscribe(holder)
            self.server.service.disconnected(self)

    def _lost(self, why: str) -> WorkerLost:
        return WorkerLost(f"worker {self.worker_id}: the connection ended: {why}; try another worker")


class MemoryConnection:
    """A frontend's end."""

    def __init__(self, link: _Link) -> None:
        self._link = link

    @property
    def worker_id(self) -> WorkerId:
        return self._link.worker_id

    def submit(self, request: Request) -> None:
        self._link.later(self._link.submit, self._encoded(request))

    def prefetch(self, prefetch: Prefetch) -> None:
        self._link.later(self._link.prefetch, self._encoded(prefetch))

    def _encoded(self, request: Request | Prefetch) -> bytes:
        if not self._link.up:
            raise WorkerLost(
                f"worker {self.worker_id}: the connection has ended; connect again or try another"
            )
        try:
            return encode(request)
        except UNENCODABLE as error:
            raise cannot_be_sent(request, error) from error

    def abort(self, request_id: RequestId) -> None:
        self._link.later(self._link.abort, request_id)

    def grant(self, request_id: RequestId, tokens: int) -> None:
        self._link.later(self._link.grant, request_id, tokens)

    def open_direct(self, request_id: RequestId, stream: DirectStream, client: DirectClient) -> bool:
        self._link.direct.open(request_id, stream, client)
        return True

    def close_direct(self, request_id: RequestId) -> WrittenTokens | None:
        return self._link.direct.close(request_id)

    def subscribe(self, after_sequence: int | None, holder: Holder = Holder.WORKER) -> None:
        self._link.later(self._link.subscribe, after_sequence, holder)

    def unsubscribe(self, holder: Holder) -> None:
        self._link.later(self._link.unsubscribe, holder)

    async def fetch(self, sha256: str) -> bytes:
        await asyncio.sleep(0)
        if not self._link.up:
            raise WorkerLost(f"worker {self.worker_id}: the connection has ended; fetch from another worker")
        content = await self._link.server.service.read_file(sha256)
        if content is None:
            raise missing_file(sha256)
        file = FileReceiver(sha256, self._link.server.config.file_bytes_max)
        file.add(content)
        return file.finish()

    async def change(self, change: WorkerChange | KvAction) -> KvReport | None:
        if not self._link.up:
            raise WorkerLost(f"worker {self.worker_id}: the connection has ended; ask over another one")
        link = self._link
        return await link.calls.ask(lambda call_id: link.later(link.change, change, call_id))

    async def expand_media(self, prompt: MediaPrompt) -> ExpandedPrompt:
        if not self._link.up:
            raise WorkerLost(f"worker {self.worker_id}: the connection has ended; ask over another one")
        link = self._link
        return await link.expansions.ask(lambda call_id: link.later(link.expand_media, prompt, call_id))

    async def count_tenants(self, counts: Mapping[str, TenantCount]) -> Mapping[str, PeerCount]:
        if not self._link.up:
            raise WorkerLost(f"worker {self.worker_id}: the connection has ended; ask over another one")
        link = self._link
        return await link.counts.ask(lambda call_id: link.later(link.count_tenants, counts, call_id))

    async def close(self) -> None:
        self._link.hang_up(tell_service=True)
