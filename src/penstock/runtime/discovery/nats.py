"""Discovery by a NATS JetStream bucket.

Every failure has one path: the connection is given up and made again, the bucket made where it is missing, all put again and all
read again. So a server that was killed, emptied or stopped needs no case of its own.
"""

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import nats.js.errors
from nats.aio.client import Client
from nats.js.api import StorageType
from nats.js.kv import KV_DEL, KV_PURGE, KeyValue

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import Instance, InstanceChange
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.credentials import Credentials
from penstock.runtime.discovery.registrations import (
    RecordError,
    Records,
    Registrations,
    RegistryMetrics,
    StoredRegistration,
)
from penstock.runtime.discovery.view import RegistryView
from penstock.runtime.handshake import Identity
from penstock.runtime.nats import NatsConnection, uncancelled
from penstock.runtime.tls import PlaneTlsConfig


class Leases:
    """When each worker was last renewed, in seconds in which the registry worked. One event loop owns it."""

    def __init__(self, lease_ttl_s: float, longest_beat_s: float) -> None:
        """Know nobody.

        Args:
            lease_ttl_s: a worker not renewed for so long has lapsed.
            longest_beat_s: what two beats far apart count at most.
        """
        self._lease_ttl_s = lease_ttl_s
        self._longest_beat_s = longest_beat_s
        self._clock_s = 0.0
        self._beat_at_s: float | None = None
        self._renewed_s: dict[WorkerId, float] = {}

    def renew(self, worker_id: WorkerId) -> None:
        self._renewed_s[worker_id] = self._clock_s

    def forget(self, worker_id: WorkerId) -> None:
        self._renewed_s.pop(worker_id, None)

    def restart(self) -> None:
        """Count the next beat as the first: the connection is a new one."""
        self._beat_at_s = None

    def beat(self, now_s: float) -> list[WorkerId]:
        """Take a beat that came back; returns the workers that have lapsed, and forgets them."""
        if self._beat_at_s is not None:
            self._clock_s += min(now_s - self._beat_at_s, self._longest_beat_s)
        self._beat_at_s = now_s
        ended_s = self._clock_s - self._lease_ttl_s
        lapsed = [worker_id for worker_id, renewed_s in self._renewed_s.items() if renewed_s < ended_s]
        for worker_id in lapsed:
            del self._renewed_s[worker_id]
        return lapsed


_WORKER, _BEAT = "worker.", "beat."
_KEPT_LEASES = 3
"""Lease times after which a key of the bucket expires."""
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
        credentials: Credentials | None = None,
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
            credentials: of the account at NATS, where it asks for one.
            config: bounds and times.
            metrics: of this client; None for none.

        Raises:
            ConfigError: a certificate cannot be read, or the account is none of NATS.
        """
        self._config = config or DiscoveryConfig()
        self._connection = NatsConnection(
            urls,
            self._open_bucket,
            needs=", with JetStream (nats-server -js)",
            rng=rng,
            tls=tls,
            credentials=credentials,
            config=self._config,
        )
        self._bucket = f"penstock_{namespace}"
        self._namespace = namespace
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
        self._registrations = Registrations(
            self._config,
            problem=lambda: (
                f"NATS at {self._connection.place}: {self._connection.last_error}: is nats-server running, with JetStream?"
            ),
        )
        self._watch_wanted = asyncio.Event()
        self._is_watching = False
        self._beat_key = _BEAT + secrets.token_hex(8)
        self._session: asyncio.Task[None] | None = None
        self._tasks = asyncio.TaskGroup()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        keeping = self._connection.keep(self._parts, on_lost=self._on_lost)
        self._session = self._tasks.create_task(keeping, name="nats connection")
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
            ConfigError: NATS does not take this account, or workers of another secret, hash key or release are registered there.
        """
        async with self._connection.connected() as (_, bucket):
            with suppress(nats.js.errors.NoKeysError):
                for key in await bucket.keys():
                    with suppress(nats.js.errors.KeyNotFoundError):
                        if key.startswith(_WORKER):
                            await self._check(bucket, key)

    async def _check(self, bucket: KeyValue, key: str) -> None:
        data = (await bucket.get(key)).value or b""
        try:
            self._records.decode(data)
        except RecordError as error:
            raise ConfigError(
                f"NATS at {self._connection.place}: namespace {self._namespace}: worker {key.removeprefix(_WORKER)} is registered"
                f" there, and {error.message}"
            ) from error

    async def register(self, instance: Instance) -> StoredRegistration:
        return await self._registrations.register(instance)

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
                await self._registrations.close()
        self._connection.close()
        if self._session is not None:
            self._session.cancel()

    def _parts(self, bucket: KeyValue) -> Sequence[Coroutine[None, None, None]]:
        """Give what runs on a connection: registrations are renewed, and changes arrive."""
        return self._keep_registered(bucket), self._keep_watching(bucket)

    def _on_lost(self, is_first: bool) -> None:  # noqa: FBT001 - called by the connection
        if is_first:
            _log.warning("registry_lost", registry=self._connection.place, error=self._connection.last_error)
        if self._is_watching:
            self._metrics.losses.inc()
        self._is_watching = False
        self._metrics.connected.set(0)

    async def _open_bucket(self, client: Client) -> KeyValue:
        stream = client.jetstream(timeout=self._config.connect_timeout_s)
        with suppress(nats.js.errors.NotFoundError):
            return await stream.key_value(self._bucket)
        ttl_s = _KEPT_LEASES * self._config.lease_ttl_s
        try:
            return await stream.create_key_value(bucket=self._bucket, ttl=ttl_s, storage=StorageType.MEMORY)
        except nats.js.errors.BadRequestError as refused:  # also said to all but one that create it at once
            try:
                return await stream.key_value(self._bucket)
            except nats.js.errors.NotFoundError:
                raise refused from None

    async def _keep_registered(self, bucket: KeyValue) -> None:
        """Put all registrations a few times in each lease, and what changes at once."""
        is_renewal = True
        while True:
            if is_renewal:
                self._registrations.resend_all()
            for registration, instance in self._registrations.unsent():
                key = _key(registration.instance.worker_id)
                if instance is None:
                    await uncancelled(bucket.delete(key))
                else:
                    await uncancelled(bucket.put(key, self._records.encode(instance)))
                self._registrations.sent(registration, instance)
            if self._watch_wanted.is_set():
                await uncancelled(bucket.put(self._beat_key, b""))
            is_renewal = not await self._registrations.until_due(self._config.lease_ttl_s / 3)

    async def _keep_watching(self, bucket: KeyValue) -> None:
        """Take changes, until none and no beat of this client's own arrives for a lease time.

        Raises:
            Unavailable: nothing arrived.
        """
        await self._watch_wanted.wait()
        self._registrations.wake.set()  # the first beat
        self._leases.restart()
        watcher = await uncancelled(bucket.watchall())
        present: set[WorkerId] | None = set()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._config.lease_ttl_s + self._config.connect_timeout_s
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    entry = await uncancelled(anext(watcher))
            except TimeoutError as error:
                raise Unavailable(
                    f"NATS at {self._connection.place}: a key that was put here has not come back for"
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
                    _log.info("registry_connected", registry=self._connection.place, workers=len(self._view))
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


def _key(worker_id: WorkerId) -> str:
    return f"{_WORKER}{worker_id:016x}"


def _worker_id(key: str) -> WorkerId | None:
    try:
        return WorkerId(int(key.removeprefix(_WORKER), 16)) if key.startswith(_WORKER) else None
    except ValueError:
        return None
