"""What a watcher makes of the Leases of a deployment: a view of its workers.

A worker is there while its Lease is held and its record known, whichever comes first. Nobody's clock is compared: a Lease lapses when no
renewal has been seen for the time that it names, in which the server answered, and a list read then shows none either. So neither skew
nor a server that hung removes a worker that lives.
"""

import asyncio
import math

from penstock.core.errors import Unavailable
from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.runtime.discovery.kubernetes.lease import Seen, lease_name, record_in, record_name, start_of
from penstock.runtime.discovery.metrics import RegistryMetrics
from penstock.runtime.discovery.refused_start import RefusedStarts
from penstock.runtime.discovery.view import RegistryView
from penstock.runtime.kubernetes.client import LEASES, KubernetesClient, KubernetesError, Object

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
        self._refused_starts = RefusedStarts(metrics)
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
        if (start := start_of(body)) is not None:
            self._refused_starts.note(body["metadata"]["name"], start)
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
