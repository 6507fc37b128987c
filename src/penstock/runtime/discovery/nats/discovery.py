"""Discovery by a NATS JetStream bucket.

Every failure has one path: the connection is given up and made again, the bucket made where it is missing, all put again and all
read again. So a server that was killed, emptied or stopped needs no case of its own.
"""

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Self

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import StorageType
from nats.js.kv import KV_DEL, KV_PURGE, KeyValue

from penstock.core.errors import ConfigError, PenstockError, Unavailable
from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import Instance, InstanceChange
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.discovery.metrics import RegistryMetrics
from penstock.runtime.discovery.nats.leases import Leases
from penstock.runtime.discovery.record import RecordError, Records
from penstock.runtime.discovery.view import RegistryView
from penstock.runtime.handshake import Identity
from penstock.runtime.tls import PlaneTlsConfig, registry_context

_WORKER, _BEAT = "worker.", "beat."
_KEPT_LEASES = 3
"""The bucket forgets a key after so many lease times."""
_ERRORS = (nats.errors.Error, OSError, TimeoutError, ValueError)
_log = get_logger()


class NatsDiscovery:
    """A client of NATS; it works while its context is entered. One event loop owns it."""

    def __init__(
        self,
        urls: Sequence[str],
        identity: Identity,
        *,
        namespace: str,
        rng: random.Random,
        tls: PlaneTlsConfig | None = None,
        config: DiscoveryConfig | None = None,
        metrics: RegistryMetrics | None = None,
    ) -> None:
        """Make a client.

        Args:
            urls: servers, `nats://HOST:4222` or tls.
            identity: has the deployment's secret and hash key.
            namespace: of the deployment; the bucket is `penstock_NAMESPACE`.
            rng: for jitter.
            tls: certificates for `tls://`.
            config: bounds and times.
            metrics: of this client; None for none.

        Raises:
            ConfigError: a certificate cannot be read.
        """
        self._urls = list(urls)
        self._config = config or DiscoveryConfig()
        self._bucket = f"penstock_{namespace}"
        self._namespace = namespace
        self._rng = rng
        self._tls = registry_context(tls) if any(url.startswith("tls:") for url in urls) else None
        self._records = Records(identity)
        self._metrics = metrics or RegistryMetrics(None)
        self._leases = Leases(self._config.lease_ttl_s, self._config.lease_ttl_s)
        self._view = RegistryView(
            self._records,
            self._metrics,
            grace_s=self._config.lease_ttl_s,
            instances_max=self._config.instances_max,
            watchers_max=self._config.connections_max,
            is_reachable=lambda: self._is_watching,
        )
        self._seen: dict[WorkerId, bytes] = {}
        self._registrations: dict[WorkerId, NatsRegistration] = {}
        self._withdrawn: dict[WorkerId, NatsRegistration] = {}
        self._wake = asyncio.Event()
        self._watch_wanted = asyncio.Event()
        self._is_watching = False
        self._last_error = "it does not answer"
        self._beat_key = _BEAT + secrets.token_hex(8)
        self._over = asyncio.Event()
        self._session: asyncio.Task[None] | None = None
        self._tasks = asyncio.TaskGroup()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._session = self._tasks.create_task(self._run(), name="nats connection")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
        await self._tasks.__aexit__(None, None, None)

    async def connect(self) -> None:
        """Check that NATS answers, and that no other deployment uses the namespace.

        Raises:
            Unavailable: NATS does not answer in time, or has no JetStream.
            ConfigError: workers of another secret, hash key or release are registered there.
        """
        async with self._connected() as (_, bucket):
            with suppress(nats.js.errors.NoKeysError):
                for key in await bucket.keys():
                    with suppress(nats.js.errors.KeyNotFoundError):
                        if key.startswith(_WORKER):
                            self._check(key, (await bucket.get(key)).value or b"")

    def _check(self, key: str, data: bytes) -> None:
        try:
            self._records.decode(data)
        except RecordError as error:
            raise ConfigError(
                f"NATS at {self._place}: namespace {self._namespace}: worker {key.removeprefix(_WORKER)} is registered"
                f" there, and {error.message}"
            ) from error

    async def register(self, instance: Instance) -> "NatsRegistration":
        registration = NatsRegistration(self, instance)
        self._registrations[instance.worker_id] = registration
        self._wake.set()
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await registration.stored.wait()
        except TimeoutError as error:
            self._withdraw(registration)  # where only the answer was lost
            raise Unavailable(
                f"NATS at {self._place}: {self._last_error}; waited {self._config.connect_timeout_s:g} s"
                " (connect_timeout_s): is nats-server running, with JetStream?"
            ) from error
        return registration

    def watch(self) -> AsyncIterator[InstanceChange]:
        self._watch_wanted.set()
        return self._view.watch()

    async def close(self) -> None:
        """Withdraw all registrations, and end every watch. Safe twice."""
        if self._closed:
            return
        self._closed = True
        self._view.close()
        with suppress(TimeoutError):  # they lapse by themselves
            async with asyncio.timeout(self._config.connect_timeout_s):
                for registration in tuple(self._registrations.values()):
                    await registration.close()
        self._over.set()
        self._wake.set()
        if self._session is not None:
            self._session.cancel()

    @property
    def _place(self) -> str:
        """The servers, without passwords."""
        return ", ".join(url.rpartition("@")[2].removeprefix("nats://") for url in self._urls)

    def _withdraw(self, registration: "NatsRegistration") -> None:
        worker_id = registration.instance.worker_id
        if self._registrations.get(worker_id) is registration:
            del self._registrations[worker_id]
            self._withdrawn[worker_id] = registration
            registration.stored.clear()
            self._wake.set()

    async def _run(self) -> None:
        """Keep a connection, on which registrations are renewed and changes arrive."""
        tries = 0
        while True:
            try:
                async with self._connected() as (closed, bucket):
                    tries = 0
                    async with asyncio.TaskGroup() as group:
                        over = self._over = asyncio.Event()
                        for part in (
                            _until_closed(closed),
                            self._keep_registered(bucket, over),
                            self._keep_watching(bucket, over),
                        ):
                            group.create_task(self._in_session(part, over))
            except* (*_ERRORS, PenstockError) as errors:
                error = errors.exceptions[0]
                self._last_error = str(error) or type(error).__name__
                if tries == 0:
                    _log.warning("registry_lost", registry=self._place, error=self._last_error)
            if self._is_watching:
                self._metrics.losses.inc()
            self._is_watching = False
            self._metrics.connected.set(0)
            for registration in self._registrations.values():
                registration.stored.clear()
            config = self._config
            longest_s = min(config.reconnect_delay_s * 2 ** min(tries, 16), config.reconnect_delay_s_max)
            tries += 1
            await asyncio.sleep(longest_s * self._rng.uniform(0.5, 1.0))

    async def _in_session(self, part: Coroutine[None, None, None], over: asyncio.Event) -> None:
        """Run a part of a session, whose end is the end of all.

        The client's calls may swallow a cancellation that comes together with their answer, so loops look at `over`, too.
        """
        try:
            await part
        finally:
            over.set()
            self._wake.set()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[asyncio.Future[None], KeyValue]]:
        """Connect; gives a future that ends with the connection, and the bucket.

        Raises:
            Unavailable: not in time, or without JetStream.
        """
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def on_closed() -> None:
            if not closed.done():
                closed.set_result(None)

        async def on_error(error: Exception) -> None:
            self._last_error = str(error) or type(error).__name__

        client = Client()
        timeout_s = self._config.connect_timeout_s
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    await client.connect(
                        self._urls,
                        allow_reconnect=False,
                        connect_timeout=max(1, int(timeout_s)),
                        error_cb=on_error,
                        closed_cb=on_closed,
                        ping_interval=max(1, int(self._config.lease_ttl_s / 3)),
                        max_outstanding_pings=2,
                        tls=self._tls,
                    )
                    bucket = await self._open_bucket(client)
            except _ERRORS as error:
                raise Unavailable(
                    f"NATS at {self._place}: {str(error) or self._last_error}; waited up to {timeout_s:g} s: is nats-server"
                    " running, with JetStream (nats-server -js)?"
                ) from error
            yield closed, bucket
        finally:
            with suppress(*_ERRORS):
                async with asyncio.timeout(timeout_s):
                    await client.close()

    async def _open_bucket(self, client: Client) -> KeyValue:
        stream = client.jetstream(timeout=self._config.connect_timeout_s)
        try:
            return await stream.key_value(self._bucket)
        except nats.js.errors.NotFoundError:
            ttl_s = _KEPT_LEASES * self._config.lease_ttl_s
            return await stream.create_key_value(bucket=self._bucket, ttl=ttl_s, storage=StorageType.MEMORY)

    async def _keep_registered(self, bucket: KeyValue, over: asyncio.Event) -> None:
        """Put all registrations a few times in each lease, and what changes at once."""
        for registration in self._registrations.values():
            registration.stored.clear()
        while not over.is_set():
            for worker_id, registration in tuple(self._withdrawn.items()):
                await bucket.delete(_key(worker_id))
                if self._withdrawn.get(worker_id) is registration:
                    del self._withdrawn[worker_id]
                registration.stored.set()
            for worker_id, registration in tuple(self._registrations.items()):
                instance = registration.instance
                await bucket.put(_key(worker_id), self._records.encode(instance))
                if registration.instance is instance and self._registrations.get(worker_id) is registration:
                    registration.stored.set()
            if self._watch_wanted.is_set():
                await bucket.put(self._beat_key, b"")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.lease_ttl_s / 3):
                    await self._wake.wait()
            self._wake.clear()

    async def _keep_watching(self, bucket: KeyValue, over: asyncio.Event) -> None:
        """Take changes, until none and no beat of this client's own arrives for a lease time.

        Raises:
            Unavailable: nothing arrived.
        """
        await self._watch_wanted.wait()
        self._wake.set()  # the first beat
        self._leases.restart()
        watcher = await bucket.watchall()
        present: set[WorkerId] | None = set()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._config.lease_ttl_s + self._config.connect_timeout_s
        while not over.is_set():
            try:
                async with asyncio.timeout_at(deadline_s):
                    entry = await anext(watcher)
            except TimeoutError as error:
                raise Unavailable(
                    f"NATS at {self._place}: a key that was put here has not come back for"
                    f" {self._config.lease_ttl_s:g} s (lease_ttl_s)"
                ) from error
            if entry is None:
                if present is not None:
                    self._view.sync(present)
                    present = None
            elif entry.key == self._beat_key:
                deadline_s = loop.time() + self._config.lease_ttl_s + self._config.connect_timeout_s
                if not self._is_watching:
                    self._is_watching = True
                    self._metrics.connected.set(1)
                    _log.info("registry_connected", registry=self._place, workers=len(self._view))
                self._take_beat(loop.time())
            elif (worker_id := _worker_id(entry.key)) is not None:
                self._apply(worker_id, entry, present)

    def _take_beat(self, now_s: float) -> None:
        for worker_id in self._leases.beat(now_s):
            self._seen.pop(worker_id, None)
            self._view.lapse(worker_id, "lease expired")

    def _apply(self, worker_id: WorkerId, entry: KeyValue.Entry, present: set[WorkerId] | None) -> None:
        if entry.operation in {KV_DEL, KV_PURGE}:
            self._leases.forget(worker_id)
            self._seen.pop(worker_id, None)
            self._view.withdraw(worker_id, "withdrawn")
            return
        if present is not None:
            present.add(worker_id)
        self._leases.renew(worker_id)
        data = entry.value or b""
        if self._seen.get(worker_id) != data or not self._view.keep(worker_id):
            self._seen[worker_id] = data
            self._view.put(worker_id, data)


class NatsRegistration:
    """One worker's registration, put again as long as it lives."""

    def __init__(self, discovery: NatsDiscovery, instance: Instance) -> None:
        self.instance = instance
        self.stored = asyncio.Event()
        """Set while NATS has it as it is."""
        self._discovery = discovery

    async def update(self, instance: Instance) -> None:
        if self._discovery._registrations.get(instance.worker_id) is self:
            self.instance = instance
            self.stored.clear()
            self._discovery._wake.set()

    async def close(self) -> None:
        discovery = self._discovery
        if discovery._registrations.get(self.instance.worker_id) is not self:
            return
        discovery._withdraw(self)
        try:
            async with asyncio.timeout(discovery._config.connect_timeout_s):
                await self.stored.wait()
        except TimeoutError:
            _log.warning(
                "withdrawal_not_stored", worker=self.instance.name, fix="its lease expires by itself"
            )


async def _until_closed(closed: asyncio.Future[None]) -> None:
    """Wait for the end of the connection.

    Raises:
        Unavailable: it has ended.
    """
    await closed
    raise Unavailable("NATS: the connection ended")


def _key(worker_id: WorkerId) -> str:
    return f"{_WORKER}{worker_id:016x}"


def _worker_id(key: str) -> WorkerId | None:
    try:
        return WorkerId(int(key.removeprefix(_WORKER), 16)) if key.startswith(_WORKER) else None
    except ValueError:
        return None
