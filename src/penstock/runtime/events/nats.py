"""KV events and load reports by NATS subjects: a worker publishes each once, however many routers there are.

NATS delivers at most once. What does not arrive is repaired over the routers' own connections to the worker, so here
whatever cannot be sent or read in time is dropped.
"""

import asyncio
import hmac
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.core.errors import ProtocolError
from penstock.core.framing import prove
from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types.events import EventBatch, Holder
from penstock.core.types.load import Broadcast, RankNews
from penstock.core.wire import encode
from penstock.runtime.config import BroadcastConfig, DiscoveryConfig
from penstock.runtime.credentials import Credentials
from penstock.runtime.handshake import Identity
from penstock.runtime.nats import NatsConnection, uncancelled
from penstock.runtime.tls import PlaneTlsConfig
from penstock.seams import BroadcastListener

_PURPOSE = b"penstock broadcast"
_PROOF_BYTES = 16
_broadcasts = msgspec.msgpack.Decoder(Broadcast)


def seal(secret: bytes, broadcast: Broadcast) -> bytes:
    """Encode a broadcast, with a proof of the secret before it."""
    body = encode(broadcast)
    return prove(secret, _PURPOSE, body)[:_PROOF_BYTES] + body


def unseal(secret: bytes, data: bytes) -> Broadcast:
    """Read a broadcast.

    Raises:
        ProtocolError: it is of another deployment or release, or damaged.
    """
    proof, body = data[:_PROOF_BYTES], data[_PROOF_BYTES:]
    if not hmac.compare_digest(proof, prove(secret, _PURPOSE, body)[:_PROOF_BYTES]):
        raise ProtocolError(
            "its proof does not fit the deployment's secret: two deployments share one runtime.namespace, or their secrets"
            " differ; give each deployment a namespace of its own, and all its hosts one secret"
        )
    try:
        return _broadcasts.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(body)} bytes cannot be read: {error}; update the older side") from error


class BroadcastMetrics:
    """Whether NATS answers, and what was lost."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        """Register them; None for nowhere."""
        registry = registry or CollectorRegistry()
        self.connected = Gauge(
            "penstock_runtime_broadcasts_connected",
            "1 while the NATS that carries KV events answers, else 0: routers ask workers for them.",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self.received = Counter(
            "penstock_runtime_broadcasts_received",
            "Messages of workers that have come by NATS.",
            registry=registry,
        )
        self.dropped = Counter(
            "penstock_runtime_broadcasts_dropped",
            "Messages of NATS that were not used: of another secret or release, or more than this process could read in time.",
            ["reason"],
            registry=registry,
        )


class Outgoing:
    """A `seams.BroadcastSink` with a bound. One event loop owns it."""

    def __init__(self, batches_max: int, *, linger_s: float, on_dropped: Callable[[int], None]) -> None:
        """Be empty.

        Args:
            batches_max: of more batches than these, all are dropped.
            linger_s: how long a batch waits for more; a load report ends the wait.
            on_dropped: called with the number of those dropped.
        """
        self._batches_max = batches_max
        self._linger_s = linger_s
        self._on_dropped = on_dropped
        self._batches: defaultdict[int, list[EventBatch]] = defaultdict(list)
        self._num_batches = 0
        self._loads: dict[int, RankNews] = {}
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        """Of the oldest batch."""

    def push_event(self, rank: int, batch: EventBatch) -> None:
        if self._num_batches >= self._batches_max:
            self._drop_batches()
        self._batches[rank].append(batch)
        self._num_batches += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._linger_s, self._due.set)

    def push_load(self, news: RankNews) -> None:
        self._loads[news.rank] = news
        self._due.set()

    async def wait(self) -> None:
        """Wait until something is to be sent."""
        await self._due.wait()

    def take(self) -> tuple[RankNews, ...]:
        """Remove and return all."""
        ranks = sorted(self._batches.keys() | self._loads.keys())
        news = []
        for rank in ranks:
            load = self._loads.get(rank, RankNews(rank=rank))
            batches = tuple(self._batches.get(rank, ()))
            news.append(RankNews(rank=rank, batches=batches, load=load.load, frontends=load.frontends))
        self._clear()
        return tuple(news)

    def drop(self) -> None:
        """Forget all."""
        self._drop_batches()
        self._clear()

    def _drop_batches(self) -> None:
        self._on_dropped(self._num_batches)
        self._batches.clear()
        self._num_batches = 0

    def _clear(self) -> None:
        self._batches.clear()
        self._num_batches = 0
        self._loads.clear()
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_UNREAD_MESSAGES_MAX = 65_536
_UNREAD_BYTES_MAX = 64 << 20
_log = get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class _Follower:
    """One connection of this process to a rank of a worker."""

    rank: int
    key: bytes
    listener: BroadcastListener

    def take(self, news: RankNews) -> None:
        for batch in news.batches:
            if news.rank == self.rank or batch.holder is not Holder.WORKER:
                self.listener.push_event(batch)
        if news.load is not None:
            for figures in news.frontends:
                if figures.key == self.key:
                    self.listener.push_load(figures.complete(news.load))


class NatsCarrier:
    """A `seams.EventCarrier`; it works while its context is entered. One event loop owns it."""

    def __init__(
        self,
        urls: Sequence[str],
        identity: Identity,
        *,
        namespace: str,
        rng: random.Random,
        tls: PlaneTlsConfig | None = None,
        credentials: Credentials | None = None,
        config: BroadcastConfig | None = None,
        connection: DiscoveryConfig | None = None,
        metrics: BroadcastMetrics | None = None,
    ) -> None:
        """Make a carrier.

        Args:
            urls: servers, `nats://HOST:4222` or tls.
            identity: has the deployment's secret.
            namespace: of the deployment; subjects are `penstock.NAMESPACE.events.WORKER`.
            rng: for jitter.
            tls: certificates for `tls://`.
            credentials: of the account at NATS, where it asks for one.
            config: bounds and times.
            connection: times of the connection.
            metrics: of this process; None for none.

        Raises:
            ConfigError: a certificate cannot be read, or the account is none of NATS.
        """
        self._config = config or BroadcastConfig()
        self._secret = identity.secret
        self._subject = f"penstock.{namespace}.events."
        self._metrics = metrics or BroadcastMetrics(None)
        self._followers: defaultdict[WorkerId, list[_Follower]] = defaultdict(list)
        self._worker_id: WorkerId | None = None
        self._outgoing = Outgoing(
            self._config.batches_max,
            linger_s=self._config.linger_s,
            on_dropped=self._metrics.dropped.labels("unsent").inc,
        )
        self._is_wanted = asyncio.Event()
        self._has_refused = False
        self._connection = NatsConnection(
            urls,
            self._open,
            needs="",
            rng=rng,
            tls=tls,
            credentials=credentials,
            config=connection or DiscoveryConfig(),
        )
        self._connection.on_error = self._on_error
        self._tasks = asyncio.TaskGroup()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        keeping = self._connection.keep(self._parts, on_lost=self._on_lost)
        self._keeper = self._tasks.create_task(keeping, name="nats events")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        if self._keeper is not None:
            self._keeper.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def connect(self) -> None:
        """Check that NATS answers.

        Raises:
            Unavailable: not in time.
            ConfigError: NATS does not take this account.
        """
        async with self._connection.connected():
            pass

    @property
    def repair_interval_s(self) -> float:
        return self._config.repair_interval_s

    def sink(self, worker_id: WorkerId) -> Outgoing:  # of the one worker of this process
        self._worker_id = worker_id
        return self._outgoing

    def follow(
        self, worker_id: WorkerId, rank: int, key: bytes, listener: BroadcastListener
    ) -> Callable[[], None]:
        follower = _Follower(rank, key, listener)
        self._followers[worker_id].append(follower)
        self._is_wanted.set()

        def unfollow() -> None:
            followers = self._followers.get(worker_id, [])
            if follower in followers:
                followers.remove(follower)
            if not followers:
                self._followers.pop(worker_id, None)

        return unfollow

    async def _open(self, client: Client) -> Client:
        return client

    def _parts(self, client: Client) -> Sequence[Coroutine[None, None, None]]:
        self._metrics.connected.set(1)
        _log.info("broadcasts_connected", nats=self._connection.place)
        return self._listen(client), self._send(client)

    def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self._metrics.dropped.labels("unread").inc()

    def _on_lost(self, is_first: bool) -> None:  # noqa: FBT001 - called by the connection
        self._metrics.connected.set(0)
        if is_first:
            fix = "routers ask workers over their connections meanwhile"
            _log.warning(
                "broadcasts_lost", nats=self._connection.place, error=self._connection.last_error, fix=fix
            )

    # -- a worker's half

    async def _send(self, client: Client) -> None:
        """Send what this process's worker tells, as long as the connection lasts."""
        self._outgoing.drop()  # what is old has been asked for
        while True:
            await self._outgoing.wait()
            worker_id = self._worker_id
            assert worker_id is not None, "it tells something"
            subject = f"{self._subject}{worker_id:016x}"
            message = seal(self._secret, Broadcast(worker_id=worker_id, ranks=self._outgoing.take()))
            if len(message) > client.max_payload:
                self._metrics.dropped.labels("too_long").inc()
                continue
            await uncancelled(client.publish(subject, message))

    # -- a router's half

    async def _listen(self, client: Client) -> None:
        """Take what workers tell, once this process follows any."""
        await self._is_wanted.wait()
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def take(message: Msg) -> None:
            self._metrics.received.inc()
            try:
                self._take(message.data)
            except Exception as error:  # noqa: BLE001 - the client would only report it
                if not failed.done():
                    failed.set_exception(error)

        await uncancelled(
            client.subscribe(
                self._subject + "*",
                cb=take,  # `next_msg` makes a task and a timeout for each message
                pending_msgs_limit=_UNREAD_MESSAGES_MAX,
                pending_bytes_limit=_UNREAD_BYTES_MAX,
            )
        )
        await failed

    def _take(self, data: bytes) -> None:
        try:
            broadcast = unseal(self._secret, data)
        except ProtocolError as error:
            self._metrics.dropped.labels("refused").inc()
            if not self._has_refused:
                self._has_refused = True
                _log.warning("broadcast_refused", nats=self._connection.place, error=error.message)
            return
        for news in broadcast.ranks:
            for follower in tuple(self._followers.get(broadcast.worker_id, ())):
                follower.take(news)
