"""A request plane over the simulated network, with the credits and connection ends of the real one.

Messages are passed without encoding, which is tested elsewhere and would take half of a run's time. Where a connection has direct
streams, its deltas are frames, which the real code takes apart.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count

import msgspec

from penstock.core.errors import PenstockError, WorkerLost
from penstock.core.framing import LENGTH_BYTES
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.events import AllBlocksCleared, EventMessage, EventPosition, Holder
from penstock.core.types.instances import Instance, WorkerChange
from penstock.core.types.kv import KvAction, KvReport
from penstock.core.types.load import PeerCount, TenantCount, WorkerLoad
from penstock.core.types.requests import Delta, ExpandedPrompt, MediaPrompt, Prefetch, Request
from penstock.core.wire import NO_TOKENS, PackedHashes, encode
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
from penstock.sim.network import Pipe, SimNetwork

_FRAME_BYTES = 64  # size of a message besides hashes; a step's tokens are negligible
_NO_HASHES = PackedHashes(b"")


class SimPlane:
    """The request plane of all hosts; `at` gives one host's."""

    def __init__(self, network: SimNetwork, config: PlaneConfig | None = None) -> None:
        self.network = network
        self.config = config or PlaneConfig()
        self.servers: dict[str, SimServer] = {}
        self._numbers = count(1)

    def at(self, host: str) -> "HostPlane":
        return HostPlane(self, host)

    def hurry(self, host: str) -> None:
        """Deliver a host's messages in flight to frontends at once, over open paths."""
        for server in self.servers.values():
            if server.host == host:
                for link in tuple(server.links):
                    link.down.hurry()

    def kill(self, host: str) -> None:
        """Kill the processes of a host: peers learn of it over the network."""
        for server in [s for s in self.servers.values() if s.host == host]:
            del self.servers[server.address]
            for link in tuple(server.links):
                link.die()

    def break_links(self, worker_host: str, frontend_host: str) -> None:
        """Reset the connections between two running hosts."""
        for server in self.servers.values():
            for link in tuple(server.links):
                if link.ends == (worker_host, frontend_host):
                    link.reset("it was reset")


class HostPlane:
    """The `seams.RequestPlane` of one host."""

    def __init__(self, plane: SimPlane, host: str) -> None:
        self._plane = plane
        self._host = host

    async def serve(self, service: WorkerService) -> "SimServer":
        plane = self._plane
        server = SimServer(plane, self._host, f"sim://{self._host}/{next(plane._numbers)}", service)
        plane.servers[server.address] = server
        return server

    async def connect(self, instance: Instance, sink: WorkerSink) -> "SimConnection":
        host = instance.address.removeprefix("sim://").partition("/")[0]
        network = self._plane.network
        await network.reach(self._host, host)
        await network.reach(host, self._host)
        server = self._plane.servers.get(instance.address)
        if server is None:
            raise WorkerLost(
                f"worker {instance.name}: nobody listens at {instance.address}; it has probably gone: try another"
            )
        server.service.check_rank(instance.rank)
        link = _Link(server, instance, self._host, sink)
        server.links.append(link)
        network.add(link)
        link.up.send(_FRAME_BYTES, link.greet)
        return SimConnection(link)


class SimServer:
    """A worker's listening endpoint."""

    def __init__(self, plane: SimPlane, host: str, address: str, service: WorkerService) -> None:
        self.host = host
        self.address = address
        self.service = service
        self.network = plane.network
        self.config = plane.config
        self.links: list[_Link] = []
        self._plane = plane

    async def close(self) -> None:
        self._plane.servers.pop(self.address, None)
        for link in tuple(self.links):
            link.say_goodbye()


class _Link:
    """One connection; the worker uses it as `FrontendSink` and `EventSink`.

    `up` leads to the worker, `down` to the frontend. Each side learns of the connection's end separately.
    """

    def __init__(self, server: SimServer, instance: Instance, frontend_host: str, sink: WorkerSink) -> None:
        self.network = server.network
        self.server = server
        self.worker_id = instance.worker_id
        self._rank = instance.rank
        self._events: dict[Holder, EventSource] = {}  # subscribed to
        self.ends = (server.host, frontend_host)
        self.worker_up = self.frontend_up = True
        self.up = Pipe(server.network, self.ends)
        self.down = Pipe(server.network, self.ends)
        self._sink = sink
        self._is_greeted = False
        self._untold: dict[RequestId, int] = {}  # by open request: tokens read and not granted yet
        self._grant_tokens = max(1, server.config.window_tokens // 4)
        self.direct = DirectDeltas(self._grant_tokens, self._written)
        self._load: WorkerLoad | None = None
        self._load_delay_s = server.network.config.load_delay_s
        self._patience: asyncio.TimerHandle | None = None
        self.calls: Calls[KvReport | None] = Calls()
        self.expansions: Calls[ExpandedPrompt] = Calls()
        self.counts: Calls[Mapping[str, PeerCount]] = Calls()
        self._outbox = Outbox(
            window_tokens=server.config.window_tokens,
            stream_bytes_max=server.config.stream_bytes_max,
            bytes_max=server.config.connection_bytes_max,
            abort=lambda request_id: server.service.abort(request_id, self),
        )

    # -- the worker's side

    def push(self, deltas: Sequence[Delta]) -> None:
        self._send_down(self._outbox.offer(deltas, writable=self.worker_up))

    def _send_down(self, deltas: Sequence[Delta]) -> None:
        if deltas:
            self.down.send(_FRAME_BYTES * len(deltas), self._deliver, deltas)

    def push_load(self, load: WorkerLoad) -> None:
        if self._load_delay_s:
            asyncio.get_running_loop().call_later(self._load_delay_s, self._send_load, load)
        else:
            self._send_load(load)

    def _send_load(self, load: WorkerLoad) -> None:
        if self._load is None:
            self.down.send(_FRAME_BYTES, self._deliver_load)
        self._load = load

    def push_event(self, message: EventMessage) -> None:
        loss = self.network.event_loss
        if loss and self.network.rng.random() < loss:
            return
        num_bytes = _FRAME_BYTES
        events = () if isinstance(message, EventPosition) else message.events
        for event in events:
            num_bytes += 0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
        self.down.send(num_bytes, self._sink.push_event, self.worker_id, message)

    # -- the frontend's side

    def send_request(self, num_bytes: int, request: Request) -> None:
        self._untold[request.request_id] = 0
        self.up.send(num_bytes, self._submit, request)

    def send_prefetch(self, num_bytes: int, prefetch: Prefetch) -> None:
        self.up.send(num_bytes, self.server.service.prefetch, prefetch, self)

    def send_abort(self, request_id: RequestId) -> None:
        self._untold.pop(request_id, None)
        self.up.send(_FRAME_BYTES, self._abort, request_id)

    def send_grant(self, request_id: RequestId, tokens: int) -> None:
        """Grant credits for tokens read, once they are a fraction of the window; not for ended requests."""
        untold = self._untold.get(request_id)
        if untold is None:
            return
        untold += tokens
        if untold >= self._grant_tokens:
            self.up.send(_FRAME_BYTES, self._grant, request_id, untold)
            untold = 0
        self._untold[request_id] = untold

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self._untold.pop(delta.request_id, None)
        if self.direct:  # messages are encoded for these alone
            message = self.direct.decode(CODEC.encode(Deltas(deltas=tuple(deltas)))[LENGTH_BYTES:])
            deltas = message.deltas if isinstance(message, Deltas) else ()
        if deltas:
            self._sink.push(self.worker_id, deltas)

    def _written(self, tokens: int, grants: Grants) -> None:
        self._sink.written(self.worker_id, tokens)
        for request_id, granted in grants if self.frontend_up else ():
            self.up.send(_FRAME_BYTES, self._grant, request_id, granted)

    def _deliver_load(self) -> None:
        load, self._load = self._load, None
        assert load is not None, "set before it was sent"
        self._sink.push_load(self.worker_id, load)

    # -- what arrives at the worker

    def greet(self) -> None:
        self._is_greeted = True
        self.server.service.connected(self, self._rank)

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

    def _submit(self, request: Request) -> None:
        self._outbox.open(request.request_id)
        self.server.service.submit(request, self)

    def _abort(self, request_id: RequestId) -> None:
        self._outbox.close(request_id)
        self.server.service.abort(request_id, self)

    def _grant(self, request_id: RequestId, tokens: int) -> None:
        self._outbox.grant(request_id, tokens)
        self._send_down(self._outbox.take())

    def change(self, change: WorkerChange | KvAction, call_id: int) -> None:
        self.server.service.change(change, partial(self._answer, call_id))

    def _answer(self, call_id: int, outcome: PenstockError | KvReport | None) -> None:
        self.down.send(_FRAME_BYTES, self.calls.answered, call_id, outcome)

    def expand_media(self, prompt: MediaPrompt, call_id: int) -> None:
        self.server.service.expand_media(prompt, partial(self._expanded, call_id))

    def _expanded(self, call_id: int, outcome: PenstockError | ExpandedPrompt) -> None:
        self.down.send(_FRAME_BYTES, self.expansions.answered, call_id, outcome)

    def count_tenants(self, counts: Mapping[str, TenantCount], call_id: int) -> None:
        peers = self.server.service.count_tenants(counts, self)
        self.down.send(_FRAME_BYTES, self.counts.answered, call_id, peers)

    # -- ends

    def on_path(self, *, is_open: bool) -> None:
        self.up.set_open(is_open=is_open)
        self.down.set_open(is_open=is_open)
        if is_open and self._patience is not None:
            self._patience.cancel()
            self._patience = None
        elif not is_open and self._patience is None:
            loop = asyncio.get_running_loop()
            timeout_s = self.server.config.heartbeat_timeout_s
            self._patience = loop.call_later(timeout_s, self.reset, "it was silent for too long")

    def say_goodbye(self) -> None:
        """Close from the worker's side, after earlier messages."""
        self._leave_worker(tell=True)
        self.down.send(_FRAME_BYTES, self._leave_frontend, "it said goodbye")

    def die(self) -> None:
        """Close because the worker's process ends."""
        self._leave_worker(tell=False)
        self.down.send(_FRAME_BYTES, self._leave_frontend, "its process is gone")

    def _fail_calls(self, error: WorkerLost) -> None:
        self.calls.fail(error)
        self.expansions.fail(error)
        self.counts.fail(error)

    def hang_up(self) -> None:
        """Close from the frontend's side."""
        if self.frontend_up:
            self.frontend_up = False
            self.down.is_deaf = True
            self._fail_calls(WorkerLost(f"worker {self.worker_id}: the connection was closed here"))
            self.up.send(_FRAME_BYTES, self._leave_worker)
            self._forget_if_over()

    def reset(self, why: str) -> None:
        """Close on both sides at once; messages in flight are lost."""
        self.up.clear()
        self.down.clear()
        self._leave_worker(tell=True)
        self._leave_frontend(why)

    def _leave_worker(self, *, tell: bool = True) -> None:
        if not self.worker_up:
            return
        self.worker_up = False
        self.up.is_deaf = True
        self.server.links.remove(self)
        if tell and self._is_greeted:
            for holder in tuple(self._events):
                self.unsubscribe(holder)
            self.server.service.disconnected(self)
        self._forget_if_over()

    def _leave_frontend(self, why: str) -> None:
        if not self.frontend_up:
            return
        self.frontend_up = False
        self.down.is_deaf = True
        error = WorkerLost(f"worker {self.worker_id}: the connection ended: {why}; try another worker")
        self._fail_calls(error)
        self._sink.lost(self.worker_id, error)
        self._forget_if_over()

    def _forget_if_over(self) -> None:
        if self.worker_up or self.frontend_up:
            return
        self.network.drop(self)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class SimConnection:
    """A frontend's side of a connection."""

    def __init__(self, link: _Link) -> None:
        self._link = link

    @property
    def worker_id(self) -> WorkerId:
        return self._link.worker_id

    def submit(self, request: Request) -> None:
        self._check_up()
        self._link.send_request(_num_bytes(request), request)

    def prefetch(self, prefetch: Prefetch) -> None:
        self._check_up()
        self._link.send_prefetch(_num_bytes(prefetch), prefetch)

    def abort(self, request_id: RequestId) -> None:
        if self._link.frontend_up:
            self._link.send_abort(request_id)

    def grant(self, request_id: RequestId, tokens: int) -> None:
        if self._link.frontend_up:
            self._link.send_grant(request_id, tokens)

    def open_direct(self, request_id: RequestId, stream: DirectStream, client: DirectClient) -> bool:
        self._link.direct.open(request_id, stream, client)
        return True

    def close_direct(self, request_id: RequestId) -> WrittenTokens | None:
        return self._link.direct.close(request_id)

    def subscribe(self, after_sequence: int | None, holder: Holder = Holder.WORKER) -> None:
        link = self._link
        if link.frontend_up:
            link.up.send(_FRAME_BYTES, link.subscribe, after_sequence, holder)

    def unsubscribe(self, holder: Holder) -> None:
        link = self._link
        if link.frontend_up:
            link.up.send(_FRAME_BYTES, link.unsubscribe, holder)

    async def fetch(self, sha256: str) -> bytes:
        link = self._link
        worker, frontend = link.ends
        await link.network.reach(frontend, worker)
        if not link.frontend_up:
            raise WorkerLost(f"worker {self.worker_id}: the connection has ended; fetch from another worker")
        content = await link.server.service.read_file(sha256)
        if content is None:
            raise missing_file(sha256)
        file = FileReceiver(sha256, link.server.config.file_bytes_max)
        file.add(content)
        await link.network.reach(worker, frontend)
        return file.finish()

    async def change(self, change: WorkerChange | KvAction) -> KvReport | None:
        if not self._link.frontend_up:
            raise WorkerLost(f"worker {self.worker_id}: the connection has ended; ask over another one")
        link = self._link
        return await link.calls.ask(lambda call_id: link.up.send(_FRAME_BYTES, link.change, change, call_id))

    async def expand_media(self, prompt: MediaPrompt) -> ExpandedPrompt:
        if not self._link.frontend_up:
            raise WorkerLost(f"worker {self.worker_id}: the connection has ended; ask over another one")
        link = self._link
        size = _FRAME_BYTES + prompt.num_bytes
        return await link.expansions.ask(
            lambda call_id: link.up.send(size, link.expand_media, prompt, call_id)
        )

    async def count_tenants(self, counts: Mapping[str, TenantCount]) -> Mapping[str, PeerCount]:
        self._check_up()
        link = self._link
        return await link.counts.ask(
            lambda call_id: link.up.send(_FRAME_BYTES, link.count_tenants, counts, call_id)
        )

    async def close(self) -> None:
        self._link.hang_up()

    def _check_up(self) -> None:
        if not self._link.frontend_up:
            raise WorkerLost(
                f"worker {self.worker_id}: the connection has ended; connect again or try another"
            )


def _num_bytes(request: Request | Prefetch) -> int:
    """Estimate a request's size on the wire: long fields are bytes already, only the rest is encoded.

    Raises:
        RequestError: a field cannot be encoded.
    """
    rest = msgspec.structs.replace(request, block_hashes=_NO_HASHES)
    num_bytes = _FRAME_BYTES + len(request.block_hashes)
    if isinstance(request, Request):
        rest = msgspec.structs.replace(rest, token_ids=NO_TOKENS)
        num_bytes += len(request.token_ids)
    try:
        return num_bytes + len(encode(rest))
    except UNENCODABLE as error:
        raise cannot_be_sent(request, error) from error
