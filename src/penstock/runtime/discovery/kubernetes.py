"""Discovery by Kubernetes: two Leases for each worker, one with its record and one renewed while it lives, and a watch of a deployment's Leases.

A client that loses the API server keeps what it knows. A Lease that is gone while its worker lives is made again.
"""

import asyncio
import base64
import datetime as dt
import math
import os
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from penstock.core.clock import wall_time_s
from penstock.core.errors import ConfigError, Unavailable
from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import Instance, InstanceChange
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.discovery.registrations import (
    RecordError,
    Records,
    Registrations,
    RegistryMetrics,
    StoredRegistration,
)
from penstock.runtime.discovery.view import RegistryView
from penstock.runtime.handshake import Identity
from penstock.runtime.kubernetes import (
    LEASES,
    KubernetesClient,
    KubernetesError,
    Object,
    Pace,
    Pod,
    Reflector,
)

DEPLOYMENT_LABEL = "penstock.dev/deployment"
RECORD = "penstock.dev/registration"
_NAME, _RECORD_NAME = "penstock-worker-", "penstock-record-"
_RENEWALS_PER_S, _WORKERS_FOR_ONE_MORE = 0.7, 300
"""All workers of a namespace together renew about 0.7 times a second, and once more for every 300 of them."""
_INT32_MAX = 2**31 - 1
_NUMBER = re.compile("[0-9a-f]{16}")


def renewal_s(num_workers: int, ttl_s: float) -> float:
    """Give how often a worker renews its Lease, so that all of a namespace do not overload the API server: three times in `ttl_s` where they are few."""
    per_s = _RENEWALS_PER_S + num_workers / _WORKERS_FOR_ONE_MORE
    return max(ttl_s / 3, num_workers / per_s)


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker's Lease as a watcher sees it.

    Attributes:
        is_held: False where it is withdrawn.
        mark: changes with each renewal.
        age_s: since its renewal, by the clocks of two hosts.
        valid_s: after its last renewal; 0 where it does not say.
    """

    worker_id: WorkerId
    is_held: bool
    mark: str
    uid: str
    revision: str
    age_s: float
    valid_s: float

    @classmethod
    def of(cls, body: Object) -> Self | None:
        """Read a Lease; None for one of others. What is not as a worker writes it counts as not said."""
        metadata, spec = body["metadata"], _mapping(body.get("spec"))
        worker_id = _worker_of(metadata["name"], _NAME)
        if worker_id is None:
            return None
        renewed, valid_s = spec.get("renewTime"), spec.get("leaseDurationSeconds")
        try:
            age_s = wall_time_s() - dt.datetime.fromisoformat(renewed or "").timestamp()
        except (TypeError, ValueError, OverflowError):
            age_s = math.inf
        uid = str(metadata.get("uid"))
        return cls(
            worker_id,
            bool(spec.get("holderIdentity")),
            f"{uid} {renewed}",
            uid,
            metadata["resourceVersion"],
            age_s,
            float(min(max(0, valid_s), _INT32_MAX)) if isinstance(valid_s, int) else 0.0,
        )


def record_in(body: Object) -> tuple[WorkerId, bytes] | None:
    """Give the worker and the encoded registration of a Lease that has one; of what cannot be read the bytes are empty."""
    metadata = body["metadata"]
    name = metadata["name"]  # a release before keeps the record in the Lease that it renews
    worker_id = _worker_of(name, _RECORD_NAME if name.startswith(_RECORD_NAME) else _NAME)
    text = _mapping(metadata.get("annotations")).get(RECORD)
    if worker_id is None or text is None:
        return None
    return worker_id, _decoded(text)  # one that is empty is refused as damaged


def lease_name(worker_id: WorkerId) -> str:
    return f"{_NAME}{worker_id:016x}"


def record_name(worker_id: WorkerId) -> str:
    return f"{_RECORD_NAME}{worker_id:016x}"


def _worker_of(name: str, prefix: str) -> WorkerId | None:
    """Give the worker of a Lease's name; None for Leases of others, whose numbers are not written as workers write them."""
    number = name.removeprefix(prefix)
    is_worker = name.startswith(prefix) and _NUMBER.fullmatch(number) is not None
    return WorkerId(int(number, 16)) if is_worker else None


def lease_of(worker_id: WorkerId, name: str, *, deployment: str, pod: Pod | None, valid_s: float) -> Object:
    """Make a worker's Lease, renewed now.

    Args:
        worker_id: names it.
        name: the worker's, for people who list Leases.
        deployment: label by which watchers choose.
        pod: its owner; None for none.
        valid_s: seconds after which it has lapsed.
    """
    body = _lease(lease_name(worker_id), deployment, pod)
    return body | {"spec": {"holderIdentity": name, **renewed(valid_s)}}


def record_of(worker_id: WorkerId, record: bytes, *, deployment: str, pod: Pod | None) -> Object:
    """Make the Lease that has a worker's record, which nobody holds or renews; the arguments are as for `lease_of`."""
    return _lease(record_name(worker_id), deployment, pod, **{RECORD: base64.b64encode(record).decode()})


def renewed(valid_s: float) -> Object:
    """Give the fields of a Lease's `spec` that a renewal sets."""
    return {"renewTime": now(), "leaseDurationSeconds": max(1, math.ceil(valid_s))}


def _decoded(text: object) -> bytes:
    """Decode an annotation; empty for what is not base64."""
    try:
        return base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        return b""


def _mapping(found: object) -> Object:
    return found if isinstance(found, dict) else {}


def _lease(name: str, deployment: str, pod: Pod | None, **annotations: str) -> Object:
    metadata: Object = {
        "name": name,
        "labels": {DEPLOYMENT_LABEL: deployment, "app.kubernetes.io/managed-by": "penstock"},
    }
    if annotations:
        metadata["annotations"] = annotations
    if pod is not None:
        metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}]
    return {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": {}}


def now() -> str:
    """Give the time as Kubernetes' MicroTime."""
    return dt.datetime.fromtimestamp(wall_time_s(), dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


_log = get_logger()


class LeaseWatcher:
    """A `Follower` of Leases. One event loop owns it."""

    def __init__(
        self,
        view: RegistryView,
        metrics: RegistryMetrics,
        client: KubernetesClient,
        *,
        labels: str,
        ttl_s: float,
    ) -> None:
        """Tell `view`; `labels` selects the deployment's Leases, which are looked at three times in `ttl_s`."""
        self.is_connected = False
        self._view = view
        self._metrics = metrics
        self._client = client
        self._labels = labels
        self._ttl_s = ttl_s
        self._seen: dict[WorkerId, Seen] = {}
        self._records: dict[WorkerId, bytes] = {}
        self._renewed_s: dict[WorkerId, float] = {}
        self._lost_at_s: float | None = None
        self._lapsed_s: dict[WorkerId, float] = {}

    def listed(self, objects: list[Object]) -> None:
        records = dict(filter(None, map(record_in, objects)))
        for worker_id, record in records.items():
            self._take_record(worker_id, record)
        self._records = records
        found = [seen for seen in map(Seen.of, objects) if seen is not None]
        present = {seen.worker_id for seen in found if seen.is_held} & self._records.keys()
        missing = {each: seen.valid_s for each, seen in self._seen.items() if each not in present}
        for worker_id in missing:
            self._forget(worker_id)
        for seen in found:
            self._take(seen)
        self._view.sync(present, missing)

    def put(self, body: Object) -> None:
        if (found := record_in(body)) is not None:
            self._take_record(*found)
        seen = Seen.of(body)
        if seen is not None:
            self._take(seen)

    def deleted(self, body: Object) -> None:
        if (found := record_in(body)) is not None:
            self._records.pop(found[0], None)  # whether the worker lives says its other Lease
        seen = Seen.of(body)
        if seen is None:
            return
        known = self._seen.get(seen.worker_id)
        self._forget(seen.worker_id)
        if not seen.is_held or (known is not None and not known.is_held):
            self._view.withdraw(seen.worker_id, "withdrawn")
        else:  # with its pod, or by somebody else while the worker lives, who sees it at the next renewal
            self._view.lapse(seen.worker_id, "its lease was deleted", grace_s=seen.valid_s)

    def connected(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            self._metrics.connected.set(1)
            _log.info("registry_connected", registry=self._client.access.server, workers=len(self._seen))
        if self._lost_at_s is not None:
            away_s = asyncio.get_running_loop().time() - self._lost_at_s
            self._renewed_s = {worker_id: at_s + away_s for worker_id, at_s in self._renewed_s.items()}
            self._lost_at_s = None

    def lost(self, error: Unavailable) -> None:
        if self.is_connected:
            self._metrics.losses.inc()
            _log.warning("registry_lost", error=error.message, known_instances=len(self._view))
        self.is_connected = False
        self._metrics.connected.set(0)
        if self._lost_at_s is None:
            self._lost_at_s = asyncio.get_running_loop().time()

    async def check_leases(self) -> None:
        """Look for Leases that are not renewed, for ever; what stays lapsed for a second time is deleted."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            if not self.is_connected:
                continue
            late = [
                worker_id
                for worker_id, seen in self._seen.items()
                if loop.time() - self._renewed_s.get(worker_id, math.inf) > seen.valid_s
            ]
            if not late:
                continue
            try:
                await self._look_again(late)
            except Unavailable as error:
                _log.debug("leases_not_read", error=error.message)

    async def _look_again(self, late: list[WorkerId]) -> None:
        """Read the Leases, and let those of `late` lapse that were not renewed meanwhile."""
        listing = await self._client.list(LEASES, self._labels)
        now_s = asyncio.get_running_loop().time()
        found = {seen.worker_id: seen for seen in map(Seen.of, listing.objects) if seen is not None}
        for worker_id in late:
            known, seen = self._seen.get(worker_id), found.get(worker_id)
            if known is None:
                continue
            if seen is not None and seen.mark != known.mark:
                self._take(seen)
                continue
            self._view.lapse(worker_id, "lease expired")
            lapsed_s = self._lapsed_s.setdefault(worker_id, now_s)
            if seen is None:
                self._forget(worker_id)
            elif now_s - lapsed_s > seen.valid_s:
                await self._clear_away(seen)

    async def _clear_away(self, seen: Seen) -> None:
        """Delete a Lease that nobody renews, as of a worker that was no pod; one renewed meanwhile stays."""
        self._forget(seen.worker_id)
        try:
            await self._client.delete(
                LEASES, lease_name(seen.worker_id), uid=seen.uid, revision=seen.revision
            )
            await self._client.delete(LEASES, record_name(seen.worker_id))
        except KubernetesError as error:
            _log.debug("lease_not_deleted", error=error.message)

    def _take(self, seen: Seen) -> None:
        worker_id, known = seen.worker_id, self._seen.get(seen.worker_id)
        record = self._records.get(worker_id)
        self._seen[worker_id] = seen
        if known is not None and known.mark == seen.mark and known.is_held == seen.is_held:
            return
        self._renewed_s[worker_id] = asyncio.get_running_loop().time()
        self._lapsed_s.pop(worker_id, None)
        if not seen.is_held:
            self._forget(worker_id)
            self._view.withdraw(worker_id, "withdrawn")
        elif record is not None and (known is None or not self._view.keep(worker_id)):
            self._view.put(worker_id, record)

    def _take_record(self, worker_id: WorkerId, record: bytes) -> None:
        is_new = self._records.get(worker_id) != record
        self._records[worker_id] = record
        seen = self._seen.get(worker_id)
        if is_new and seen is not None and seen.is_held:
            self._view.put(worker_id, record)

    def _forget(self, worker_id: WorkerId) -> None:
        for table in (self._seen, self._renewed_s, self._lapsed_s):
            table.pop(worker_id, None)


_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_STALE_LEASES = 3
"""A Lease not renewed for so many times of its validity is nobody's, whatever two clocks say."""
_LEASES_PER_WORKER = 2
_RENEWALS = 2
"""How often a Lease is renewed while it is valid, at the least; a renewal that fails is tried again at once."""


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
                raise ConfigError(
                    f"Kubernetes at {self._client.access.server}: namespace {self._namespace}: worker {seen.worker_id:x} is"
                    f" registered there, and {error.message}"
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
