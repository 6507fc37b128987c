"""Discovery by Kubernetes: two Leases for each worker, one with its record and one renewed while it lives, and a watch of a deployment's Leases.

A client that loses the API server keeps what it knows. A Lease that is gone while its worker lives is made again.
"""

import asyncio
import os
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import Instance, InstanceChange
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.discovery.kubernetes.lease import (
    DEPLOYMENT_LABEL,
    Seen,
    lease_name,
    lease_of,
    record_in,
    record_name,
    record_of,
    renewal_s,
    renewed,
    start_lease,
)
from penstock.runtime.discovery.kubernetes.watcher import LeaseWatcher
from penstock.runtime.discovery.metrics import RegistryMetrics
from penstock.runtime.discovery.record import RecordError, Records
from penstock.runtime.discovery.refused_start import refused_start, start_key
from penstock.runtime.discovery.registrations import Registrations, StoredRegistration
from penstock.runtime.discovery.view import RegistryView
from penstock.runtime.handshake import Identity
from penstock.runtime.kubernetes.client import LEASES, KubernetesClient, KubernetesError, Object
from penstock.runtime.kubernetes.pod import Pod
from penstock.runtime.kubernetes.reflector import Pace, Reflector

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_STALE_LEASES = 3
"""A Lease not renewed for so many times of its validity is nobody's, whatever two clocks say."""
_LEASES_PER_WORKER = 2
_RENEWALS = 2
"""How often a Lease is renewed while it is valid, at the least; a renewal that fails is tried again at once."""
_log = get_logger()


@contextmanager
def _kept(refused: list[KubernetesError]) -> Iterator[None]:
    """Keep what the server refuses of one Lease, and go on with the next one."""
    try:
        yield
    except KubernetesError as error:
        refused.append(error)


class KubernetesDiscovery:
    """A client of the API server; it works while its context is entered. One event loop owns it."""

    def __init__(
        self,
        client: KubernetesClient,
        identity: Identity,
        *,
        namespace: str,
        rng: random.Random,
        pod: Pod | None = None,
        config: DiscoveryConfig | None = None,
        metrics: RegistryMetrics | None = None,
    ) -> None:
        """Make a client.

        Args:
            client: of the API server, entered and left with this context; its namespace has the Leases.
            identity: has the deployment's secret and hash key.
            namespace: of the deployment, a label of its Leases; several deployments may share a namespace of Kubernetes.
            rng: for jitter.
            pod: of this process, which owns its Leases; None is that of the downward API's variables.
            config: bounds and times.
            metrics: of this client; None for none.

        Raises:
            ConfigError: `namespace` cannot be a label.
        """
        if not _LABEL.fullmatch(namespace):
            raise ConfigError(
                f"runtime.namespace: {namespace!r} cannot be a label of Kubernetes; use up to 63 letters, digits, '-', '_' or '.',"
                " the first and the last a letter or digit"
            )
        self._config = config or DiscoveryConfig()
        self._client = client
        self._renewal_s = self._config.lease_ttl_s / 3
        self._records = Records(identity)
        self._namespace = namespace
        self._labels = f"{DEPLOYMENT_LABEL}={namespace}"
        self._pod = pod or Pod.of(os.environ)
        self._rng = rng
        metrics = metrics or RegistryMetrics(None)
        self._view = RegistryView(
            self._records,
            metrics,
            grace_s=self._config.lease_ttl_s,
            instances_max=self._config.instances_max,
            watchers_max=self._config.connections_max,
            is_reachable=lambda: self._leases.is_connected,
        )
        self._leases = LeaseWatcher(
            self._view, metrics, self._client, labels=self._labels, ttl_s=self._config.lease_ttl_s
        )
        self._registrations = Registrations(
            self._config,
            problem=lambda: f"{self._last_error}: is the API server of Kubernetes reachable?",
        )
        self._last_error = "it does not answer"
        self._watch_wanted = asyncio.Event()
        self._running: list[asyncio.Task[None]] = []
        self._tasks = asyncio.TaskGroup()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        await self._tasks.__aenter__()
        self._running = [
            self._tasks.create_task(self._keep_registered(), name="kubernetes leases"),
            self._tasks.create_task(self._keep_watching(), name="kubernetes watch"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
        await self._tasks.__aexit__(None, None, None)
        await self._client.__aexit__(None, None, None)

    async def connect(self) -> None:
        """Check that the API server answers this process, and that no other deployment uses the namespace.

        Raises:
            Unavailable: it does not answer in time.
            ConfigError: it does not know this process, or workers of another secret, hash key or release are registered there.
        """
        try:
            listing = await self._client.list(LEASES, self._labels)
        except KubernetesError as error:
            if error.status in {401, 403}:
                raise ConfigError(
                    f"{error.message}; give the service account of this pod get, list, watch, create, patch and delete of"
                    f" leases.coordination.k8s.io in namespace {self._client.namespace}"
                ) from error
            raise
        records = dict(filter(None, map(record_in, listing.objects)))
        for seen in map(Seen.of, listing.objects):
            is_live = seen is not None and seen.is_held and seen.age_s <= _STALE_LEASES * seen.valid_s
            if seen is None or not is_live or seen.worker_id not in records:
                continue
            try:
                self._records.decode(records[seen.worker_id])
            except RecordError as error:
                await self._note_refused_start(error.reason)
                raise ConfigError(
                    f"Kubernetes at {self._client.access.server}: namespace {self._namespace}: worker {seen.worker_id:x} is"
                    f" registered there, and {error.message}"
                ) from error

    async def _note_refused_start(self, reason: str) -> None:
        """Leave a note for the running deployment that this process gives up its start: its watches see the Lease come and go."""
        lease = start_lease(start_key(), refused_start(reason), deployment=self._namespace, pod=self._pod)
        try:
            await self._client.create(LEASES, lease)
            await self._client.delete(LEASES, lease["metadata"]["name"])
        except Unavailable as error:
            _log.debug("refused_start_not_noted", error=error.message)

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
        for task in self._running:
            task.cancel()

    async def _keep_watching(self) -> None:
        await self._watch_wanted.wait()
        config = self._config
        pace = Pace(config.lease_ttl_s / 3, config.reconnect_delay_s, config.reconnect_delay_s_max)
        reflector = Reflector(self._client, LEASES, self._labels, self._leases, pace=pace, rng=self._rng)
        async with asyncio.TaskGroup() as group:
            group.create_task(reflector.run())
            group.create_task(self._leases.check_leases())

    async def _keep_registered(self) -> None:
        """Renew the Leases, and store what changes; a refused one stops no other, and what is left is tried again."""
        registrations, loop = self._registrations, asyncio.get_running_loop()
        renew_at_s = loop.time()
        due: list[StoredRegistration] = []
        tries = 0
        while True:
            refused: list[KubernetesError] = []
            try:
                is_due = loop.time() >= renew_at_s
                if is_due:
                    due = list(registrations.current.values())
                    renew_at_s = loop.time() + self._renewal_s * self._rng.uniform(0.8, 1.0)
                for registration in tuple(due):
                    with _kept(refused):
                        await self._renew(registration)
                        due.remove(registration)
                for registration, instance in registrations.unsent():
                    with _kept(refused):
                        await self._store(registration.instance.worker_id, instance)
                        registrations.sent(registration, instance)
                if is_due and registrations.current:
                    with _kept(refused):
                        num_workers = await self._client.count(LEASES) // _LEASES_PER_WORKER
                        self._renewal_s = renewal_s(num_workers, self._config.lease_ttl_s)
                if refused:
                    raise refused[0]
                if tries:
                    _log.info("registry_reached", registry=self._client.access.server)
                tries = 0
                await registrations.until_due(
                    max(0.0, renew_at_s - loop.time()) if registrations.current else None
                )
            except Unavailable as error:
                self._last_error = error.message
                if tries == 0:
                    _log.warning("registry_unreachable", error=error.message)
                tries += 1
                await asyncio.sleep(
                    max(self._config.retry_delay_s(tries, self._rng), error.retry_after_s or 0.0)
                )

    async def _renew(self, registration: StoredRegistration) -> None:
        worker_id = registration.instance.worker_id
        if not registration.stored.is_set() or self._registrations.current.get(worker_id) is not registration:
            return
        is_there = await self._patch(lease_name(worker_id), {"spec": renewed(self._valid_s)})
        if is_there and await self._client.find(LEASES, record_name(worker_id)) is not None:
            return
        _log.warning("lease_lost", worker=registration.instance.name, registry=self._client.access.server)
        self._registrations.resend_all()

    @property
    def _valid_s(self) -> float:
        return max(self._config.lease_ttl_s, _RENEWALS * self._renewal_s)

    async def _store(self, worker_id: WorkerId, instance: Instance | None) -> None:
        """Create or change a worker's Leases; None withdraws it."""
        if instance is None:
            if await self._patch(lease_name(worker_id), {"spec": {"holderIdentity": None}}):
                await self._client.delete(LEASES, lease_name(worker_id))
            await self._client.delete(LEASES, record_name(worker_id))
            return
        record = self._records.encode(instance)
        about: dict[str, Any] = {"deployment": self._namespace, "pod": self._pod}
        for lease in (
            record_of(worker_id, record, **about),
            lease_of(worker_id, instance.name, valid_s=self._valid_s, **about),
        ):
            try:
                await self._client.create(LEASES, lease)
            except KubernetesError as error:
                if error.status != 409:  # it is there, or an answer was lost
                    raise
                await self._patch(lease["metadata"]["name"], lease)

    async def _patch(self, name: str, body: Object) -> bool:
        """Change a Lease; False where there is none."""
        try:
            await self._client.patch(LEASES, name, body)
        except KubernetesError as error:
            if error.status == 404:
                return False
            raise
        return True
