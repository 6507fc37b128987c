"""Discovery by etcd: a key for each worker, with the lease of its process, and a watch.

A client that loses etcd keeps what it knows. After each reconnect it lists all keys and watches from there, so that compaction
and a restart without data need no case of their own. A process whose lease has lapsed makes another and registers again.
"""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import Instance, InstanceChange
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.credentials import Credentials
from penstock.runtime.discovery.etcd.client import EtcdClient, KeyValue
from penstock.runtime.discovery.etcd.user import EtcdRefusal
from penstock.runtime.discovery.metrics import RegistryMetrics
from penstock.runtime.discovery.record import RecordError, Records
from penstock.runtime.discovery.refused_start import KEPT_LEASES, RefusedStarts, refused_start, start_key
from penstock.runtime.discovery.registrations import Registrations, StoredRegistration
from penstock.runtime.discovery.view import RegistryView
from penstock.runtime.handshake import Identity
from penstock.runtime.tls import PlaneTlsConfig

_WITHDRAWN = b""
"""Value of a key whose worker withdraws it, just before it is deleted; one deleted without it has lapsed."""
_log = get_logger()


class EtcdDiscovery:
    """A client of etcd; it works while its context is entered. One event loop owns it."""

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
            urls: endpoints of etcd, `http://HOST:2379` or https.
            identity: has the deployment's secret and hash key.
            namespace: of the deployment; keys are `/penstock/NAMESPACE/workers/ID` and `.../starts/ID`.
            rng: for jitter.
            tls: certificates for https.
            credentials: of etcd's user, where it asks for one.
            config: bounds and times.
            metrics: of this client; None for none.

        Raises:
            ConfigError: a certificate cannot be read, or the account is none of etcd.
        """
        self._config = config or DiscoveryConfig()
        self._client = EtcdClient(
            urls, timeout_s=self._config.connect_timeout_s, tls=tls, credentials=credentials
        )
        self._records = Records(identity)
        self._metrics = metrics or RegistryMetrics(None)
        self._namespace = namespace
        self._root = f"/penstock/{namespace}/".encode()
        self._prefix = self._root + b"workers/"
        self._starts = self._root + b"starts/"
        self._rng = rng
        self._view = RegistryView(
            self._records,
            self._metrics,
            grace_s=self._config.lease_ttl_s,
            instances_max=self._config.instances_max,
            watchers_max=self._config.connections_max,
            is_reachable=lambda: self._is_watching,
        )
        self._refused_starts = RefusedStarts(self._metrics)
        self._ttl_s = max(1, math.ceil(self._config.lease_ttl_s))
        self._lease: str | None = None
        self._registrations = Registrations(self._config, problem=lambda: self._problem)
        self._is_watching = False
        self._problem = "it does not answer; is etcd running there?"
        self._watcher: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._tasks = asyncio.TaskGroup()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        await self._tasks.__aenter__()
        self._keeper = self._tasks.create_task(self._keep_registered(), name="etcd lease")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
        await self._tasks.__aexit__(None, None, None)
        await self._client.__aexit__(None, None, None)

    async def connect(self) -> None:
        """Check that etcd answers, and that no other deployment uses the namespace.

        Raises:
            Unavailable: etcd does not answer in time.
            ConfigError: etcd does not take this user, or workers of another secret, hash key or release are registered there.
        """
        try:
            listing = await self._client.read(self._prefix)
        except EtcdRefusal as error:
            raise ConfigError(error.message) from error
        for pair in listing.pairs:
            if pair.value == _WITHDRAWN:
                continue
            try:
                self._records.decode(pair.value)
            except RecordError as error:
                await self._note_refused_start(error.reason)
                raise ConfigError(
                    f"etcd at {self._client.url}: namespace {self._namespace}: worker {pair.key[len(self._prefix) :].decode()}"
                    f" is registered there, and {error.message}"
                ) from error

    async def _note_refused_start(self, reason: str) -> None:
        """Leave a note for the running deployment that this process gives up its start."""
        try:
            lease = await self._client.grant(KEPT_LEASES * self._ttl_s)
            await self._client.put(self._starts + start_key().encode(), refused_start(reason), lease)
        except Unavailable as error:
            _log.debug("refused_start_not_noted", error=error.message)

    async def register(self, instance: Instance) -> StoredRegistration:
        return await self._registrations.register(instance)

    def watch(self) -> AsyncIterator[InstanceChange]:
        if self._watcher is None and not self._closed:
            self._watcher = self._tasks.create_task(self._keep_watching(), name="etcd watch")
        return self._view.watch()

    async def close(self) -> None:
        """Withdraw all registrations, and end every watch. Safe twice."""
        if self._closed:
            return
        self._closed = True
        self._view.close()
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await self._registrations.close()
                if self._lease is not None:
                    await self._client.revoke(self._lease)
        except (TimeoutError, Unavailable) as error:
            _log.warning("lease_not_revoked", error=str(error), fix="it expires by itself")
        for task in (self._keeper, self._watcher):
            if task is not None:
                task.cancel()

    async def _keep_registered(self) -> None:
        """Keep the lease, and store what changes; after an error all again."""
        tries = 0
        while True:
            try:
                if tries:
                    await asyncio.sleep(self._config.retry_delay_s(tries, self._rng))
                else:
                    await self._registrations.until_due(
                        self._config.lease_ttl_s / 3 if self._registrations.current else None
                    )
                await self._store()
                if tries and self._lease is not None:
                    _log.info("registry_reached", registry=self._client.url)
                tries = 0
            except Unavailable as error:
                self._problem = str(error)
                if tries == 0:
                    _log.warning("registry_unreachable", error=error.message)
                tries += 1

    async def _store(self) -> None:
        client, registrations = self._client, self._registrations
        if self._lease is not None and not await client.keep_alive(self._lease):
            _log.warning("lease_lost", registry=client.url, workers=len(registrations.current))
            self._lease = None
        if self._lease is None:
            registrations.resend_all()
        for registration, instance in registrations.unsent():
            if instance is None and self._lease is None:  # what was withdrawn has expired with its lease
                registrations.sent(registration, instance)
                continue
            if self._lease is None:
                self._lease = await client.grant(self._ttl_s)
            key = self._key(registration.instance.worker_id)
            value = _WITHDRAWN if instance is None else self._records.encode(instance)
            if not await client.put(key, value, self._lease):
                self._lease = None
                raise Unavailable(f"etcd at {client.url}: the lease has expired meanwhile")
            if instance is None:
                await client.delete(key)
            registrations.sent(registration, instance)

    async def _keep_watching(self) -> None:
        """Watch; after an error list all again. The end of a watch by an error may swallow a cancellation, so `close` is looked at."""
        tries = 0
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    probing = group.create_task(self._probe())
                    try:
                        await self._watch_once()
                    finally:
                        probing.cancel()
            except* Unavailable as errors:
                error = errors.exceptions[0]
                self._problem = str(error)
                tries = 1 if self._is_watching else tries + 1
                if tries == 1:
                    _log.warning("registry_lost", error=str(error), known_instances=len(self._view))
            if self._is_watching:
                self._metrics.losses.inc()
            self._is_watching = False
            self._metrics.connected.set(0)
            if self._closed:
                return
            await asyncio.sleep(self._config.retry_delay_s(tries, self._rng))

    async def _watch_once(self) -> None:
        listing = await self._client.read(self._root)
        self._apply(listing.pairs)
        present = {
            worker_id
            for pair in listing.pairs
            if pair.value != _WITHDRAWN and (worker_id := self._worker_id(pair.key)) is not None
        }
        self._view.sync(present)
        async with aclosing(self._client.watch(self._root, listing.revision)) as changes:
            async for pairs in changes:
                if not self._is_watching:
                    self._is_watching = True
                    self._metrics.connected.set(1)
                    _log.info("registry_connected", registry=self._client.url, workers=len(present))
                self._apply(pairs)

    async def _probe(self) -> None:
        """Ask etcd something now and then: a watch of a server that hangs says nothing.

        Raises:
            Unavailable: it does not answer.
        """
        while True:
            await asyncio.sleep(self._config.lease_ttl_s / 3)
            await self._client.probe(self._prefix)

    def _apply(self, pairs: Sequence[KeyValue]) -> None:
        for pair in pairs:
            if pair.key.startswith(self._starts) and not pair.is_deleted:
                self._refused_starts.note(pair.key.decode(errors="replace"), pair.value)
            worker_id = self._worker_id(pair.key)
            if worker_id is None:
                continue
            if pair.is_deleted:
                self._view.lapse(worker_id, "lease expired")
            elif pair.value == _WITHDRAWN:
                self._view.withdraw(worker_id, "withdrawn")
            else:
                self._view.put(worker_id, pair.value)

    def _key(self, worker_id: WorkerId) -> bytes:
        return self._prefix + f"{worker_id:016x}".encode()

    def _worker_id(self, key: bytes) -> WorkerId | None:
        if not key.startswith(self._prefix):
            return None
        try:
            return WorkerId(int(key[len(self._prefix) :], 16))
        except ValueError:
            return None
