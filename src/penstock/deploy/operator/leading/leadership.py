"""One operator of several acts: the one that holds a Lease."""

import asyncio
import datetime as dt
import math
import random
from collections.abc import Callable, Coroutine

from penstock.core.clock import wall_time_s
from penstock.core.errors import Unavailable
from penstock.core.log import get_logger
from penstock.runtime.kubernetes import LEASES, KubernetesClient, KubernetesError, Object

_log = get_logger()


class Leadership:
    """Holds a Lease while it runs something. One event loop owns it.

    A holder that cannot renew in two thirds of the time stops before anybody else may begin. Clocks are not compared: a Lease has
    expired when it has not changed for its time as seen from here.
    """

    def __init__(
        self, client: KubernetesClient, name: str, identity: str, *, duration_s: float, rng: random.Random
    ) -> None:
        """Hold nothing yet.

        Args:
            client: of the namespace of the Lease.
            name: of the Lease.
            identity: of this process, unlike any other's.
            duration_s: seconds after which another may take a Lease that is not renewed.
            rng: for jitter.
        """
        self._client = client
        self._name = name
        self._identity = identity
        self._duration_s = duration_s
        self._rng = rng
        self._seen: tuple[str, float] | None = None
        self._answered_s = -math.inf

    async def run(self, lead: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run `lead` whenever this process is the leader, until cancelled; it is cancelled where the Lease is lost."""
        while True:
            lease = await self._acquire()
            _log.info("leadership_acquired", lease=self._name, identity=self._identity)
            try:
                async with asyncio.TaskGroup() as group:
                    leading = group.create_task(lead())
                    await self._keep(lease)
                    leading.cancel()
            finally:
                await self._release()
            _log.warning("leadership_lost", lease=self._name, identity=self._identity)

    def has_answered(self) -> bool:
        """Whether the API server has answered about the Lease within its time."""
        return asyncio.get_running_loop().time() - self._answered_s <= self._duration_s

    async def _acquire(self) -> Object:
        """Wait until the Lease is this process's."""
        while True:
            try:
                lease = await self._try()
                self._answered_s = asyncio.get_running_loop().time()
            except Unavailable as error:
                lease = None
                _log.warning("lease_not_acquired", lease=self._name, error=error.message)
            if lease is not None:
                return lease
            await asyncio.sleep(self._duration_s / 4 * self._rng.uniform(0.5, 1.0))

    async def _try(self) -> Object | None:
        lease = await self._client.find(LEASES, self._name)
        try:
            if lease is None:
                metadata = {"name": self._name, "labels": {"app.kubernetes.io/managed-by": "penstock"}}
                body = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata}
                return await self._client.create(LEASES, body | {"spec": self._spec(0)})
            spec = lease.get("spec") or {}
            holder = spec.get("holderIdentity")
            if holder and holder != self._identity and not self._has_expired(lease):
                return None
            transitions = int(spec.get("leaseTransitions") or 0) + 1
            return await self._client.replace(LEASES, {**lease, "spec": self._spec(transitions)})
        except KubernetesError as error:
            if error.status == 409:  # another was faster
                return None
            raise

    def _has_expired(self, lease: Object) -> bool:
        now_s, revision = asyncio.get_running_loop().time(), lease["metadata"]["resourceVersion"]
        if self._seen is None or self._seen[0] != revision:
            self._seen = (revision, now_s)
        duration_s = lease["spec"].get("leaseDurationSeconds") or self._duration_s
        return now_s - self._seen[1] > duration_s

    async def _keep(self, lease: Object) -> None:
        """Renew the Lease; returns when it is another's, or could not be renewed in time."""
        loop = asyncio.get_running_loop()
        renewed_s = loop.time()
        while True:
            await asyncio.sleep(self._duration_s / 6)
            try:
                async with asyncio.timeout_at(renewed_s + self._duration_s * 2 / 3):
                    spec = self._spec(int(lease["spec"].get("leaseTransitions") or 0))
                    lease = await self._client.replace(LEASES, {**lease, "spec": spec})
                renewed_s = self._answered_s = loop.time()
            except TimeoutError:
                return
            except Unavailable as error:
                _log.warning("lease_not_renewed", lease=self._name, error=error.message)
                if isinstance(error, KubernetesError) and error.status in {404, 409}:
                    found = await self._reread()
                    if found is None:
                        return
                    lease = found
                if loop.time() - renewed_s > self._duration_s * 2 / 3:
                    return

    async def _reread(self) -> Object | None:
        """Give the Lease where it is this process's still, as after a lost answer."""
        try:
            lease = await self._client.find(LEASES, self._name)
        except Unavailable:
            return None
        is_ours = lease is not None and lease.get("spec", {}).get("holderIdentity") == self._identity
        return lease if is_ours else None

    async def _release(self) -> None:
        """Let another begin at once."""
        try:
            lease = await self._reread()
            if lease is not None:
                lease["spec"].pop("holderIdentity", None)
                await self._client.replace(LEASES, lease)
        except Unavailable as error:
            _log.debug("lease_not_released", error=error.message)

    def _spec(self, transitions: int) -> Object:
        now = dt.datetime.fromtimestamp(wall_time_s(), dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, math.ceil(self._duration_s)),
            "renewTime": now,
            "leaseTransitions": transitions,
        }
