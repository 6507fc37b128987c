"""Of several operators of a namespace one acts: the one that holds the lock in that namespace.

The lock is a ConfigMap, not a Lease: pods of graphs may write the Leases of their namespace, and no pod may stop the operator. It is in the
operated namespace, so that operators that run in two namespaces never act on one.
"""

import asyncio
import math
import random
from collections.abc import Callable, Coroutine

from penstock.core.errors import Unavailable
from penstock.core.log import get_logger
from penstock.runtime.kubernetes import KubernetesClient, KubernetesError, Object, Resource

CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
LOCK = "penstock-operator"
_LABEL = "penstock.dev/claim"
_SECONDS_MAX = 3600.0
_log = get_logger()


class Leadership:
    """Holds the lock while it runs something. One event loop owns it.

    A holder that cannot renew the lock within two thirds of its duration stops before another may begin. Clocks are not compared: a
    lock has expired once this process has seen no change of it for its duration.
    """

    def __init__(
        self, client: KubernetesClient, identity: str, *, duration_s: float, rng: random.Random
    ) -> None:
        """Hold nothing yet.

        Args:
            client: of the operated namespace.
            identity: of this process, unlike any other's.
            duration_s: seconds after which another may take a lock that is not renewed.
            rng: for jitter, and the random mark of each renewal.
        """
        self._client = client
        self._identity = identity
        self._duration_s = duration_s
        self._rng = rng
        self._seen: tuple[str, float] | None = None
        self._holder = ""
        self._answered_s = -math.inf

    async def run(self, lead: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run `lead` whenever this process is the leader, until cancelled. `lead` is cancelled where the lock is lost."""
        while True:
            lock = await self._acquire()
            _log.info("leadership_acquired", namespace=self._client.namespace, identity=self._identity)
            try:
                async with asyncio.TaskGroup() as group:
                    leading = group.create_task(lead())
                    await self._keep(lock)
                    leading.cancel()
            finally:
                await self._release()
            _log.warning("leadership_lost", namespace=self._client.namespace, identity=self._identity)

    def has_answered(self) -> bool:
        """Whether the API server has answered about the lock within its duration."""
        return asyncio.get_running_loop().time() - self._answered_s <= self._duration_s

    async def _acquire(self) -> Object:
        """Wait until this process holds the lock."""
        while True:
            try:
                lock = await self._try()
                self._answered_s = asyncio.get_running_loop().time()
            except Unavailable as error:
                lock = None
                _log.warning("lock_not_acquired", namespace=self._client.namespace, error=error.message)
            if lock is not None:
                return lock
            await asyncio.sleep(self._duration_s / 4 * self._rng.uniform(0.5, 1.0))

    async def _try(self) -> Object | None:
        lock = await self._find()
        if lock is not None and not self._is_free(lock):
            return None
        try:
            if lock is not None:
                return await self._renew(lock)
            metadata = {"name": LOCK, "labels": {_LABEL: "operator"}}
            body = {"apiVersion": CONFIG_MAPS.api_version, "kind": CONFIG_MAPS.kind, "metadata": metadata}
            return await self._client.create(CONFIG_MAPS, body | {"data": self._data()})
        except KubernetesError as error:
            if error.status == 409:  # another was faster
                return None
            raise

    def _is_free(self, lock: Object) -> bool:
        """Whether nobody else holds the lock, or its holder has not renewed it for its duration."""
        holder = _holder_of(lock)
        if holder in {"", self._identity}:
            return True
        if holder != self._holder:
            self._holder = holder
            _log.info("another_operator_leads", namespace=self._client.namespace, holder=holder)
        now_s, revision = asyncio.get_running_loop().time(), lock["metadata"]["resourceVersion"]
        if self._seen is None or self._seen[0] != revision:
            self._seen = (revision, now_s)
        return now_s - self._seen[1] > _seconds_of(lock, self._duration_s)

    async def _keep(self, lock: Object) -> None:
        """Renew the lock; return when another holds it, or it could not be renewed in time."""
        loop = asyncio.get_running_loop()
        renewed_s = loop.time()
        while True:
            await asyncio.sleep(self._duration_s / 6)
            try:
                async with asyncio.timeout_at(renewed_s + self._duration_s * 2 / 3):
                    lock = await self._renew(lock)
                renewed_s = self._answered_s = loop.time()
            except TimeoutError:
                return
            except Unavailable as error:
                _log.warning("lock_not_renewed", namespace=self._client.namespace, error=error.message)
                if isinstance(error, KubernetesError) and error.status in {404, 409}:
                    found = await self._reread()
                    if found is None:
                        return
                    lock = found
                if loop.time() - renewed_s > self._duration_s * 2 / 3:
                    return

    async def _reread(self) -> Object | None:
        """Give the lock where this process holds it still, as after a lost answer."""
        try:
            lock = await self._find()
        except Unavailable:
            return None
        return lock if lock is not None and _holder_of(lock) == self._identity else None

    async def _release(self) -> None:
        """Let another begin at once."""
        try:
            lock = await self._reread()
            if lock is not None:
                await self._write(lock, {"operator": None})
        except Unavailable as error:
            _log.debug("lock_not_released", error=error.message)

    async def _find(self) -> Object | None:
        listing = await self._client.list(CONFIG_MAPS, f"{_LABEL}=operator")
        return next((each for each in listing.objects if each["metadata"]["name"] == LOCK), None)

    async def _renew(self, lock: Object) -> Object:
        return await self._write(lock, self._data())

    async def _write(self, lock: Object, data: Object) -> Object:
        """Change the lock's data; a KubernetesError of status 409 where somebody else has changed the lock since it was read."""
        revision = {"resourceVersion": lock["metadata"]["resourceVersion"]}
        return await self._client.patch(CONFIG_MAPS, LOCK, {"metadata": revision, "data": data})

    def _data(self) -> Object:
        return {
            "operator": self._identity,
            "seconds": f"{self._duration_s:g}",
            "renewal": f"{self._rng.getrandbits(64):016x}",
        }


def _holder_of(lock: Object) -> str:
    return (lock.get("data") or {}).get("operator") or ""


def _seconds_of(lock: Object, default_s: float) -> float:
    """Give the duration that the holder wrote, at most an hour."""
    try:
        seconds = float((lock.get("data") or {}).get("seconds") or default_s)
    except ValueError:
        return default_s
    return min(_SECONDS_MAX, max(0.0, seconds))
