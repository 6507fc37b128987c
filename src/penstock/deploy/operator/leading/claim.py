"""A claim on the operated namespace, so that operators of two namespaces never operate the same one.

The claim is a ConfigMap, not a Lease, since pods of graphs may write Leases there.
"""

import asyncio
import random
from collections.abc import Callable

from penstock.core.errors import Unavailable
from penstock.core.log import get_logger
from penstock.runtime.kubernetes import KubernetesClient, KubernetesError, Object, Resource

CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
CLAIM = "penstock-operator"
_LABEL = "penstock.dev/claim"
_log = get_logger()


class Claim:
    """The claim of one namespace's operators. One event loop owns it.

    Clocks are not compared: another operator's claim has lapsed once this process has seen no change of it for its duration. An
    operator that cannot renew its own claim within two thirds of the duration gives it up, before others may take it.
    """

    def __init__(
        self,
        client: KubernetesClient,
        owner: str,
        *,
        duration_s: float,
        rng: random.Random,
        on_conflict: Callable[[bool], None],
    ) -> None:
        """Claim nothing yet.

        Args:
            client: of the namespace that is operated.
            owner: namespace of this operator.
            duration_s: seconds after which a claim that is not renewed has lapsed.
            rng: for jitter and the random mark of each renewal.
            on_conflict: called with whether operators of another namespace have the claim.
        """
        self._client = client
        self._owner = owner
        self._duration_s = duration_s
        self._rng = rng
        self._on_conflict = on_conflict
        self._seen: tuple[str, float] = ("", 0.0)
        self._renewed_s = 0.0

    async def acquire(self) -> None:
        """Wait until this namespace's operators have the claim."""
        while True:
            if await self._try():
                return
            await asyncio.sleep(self._duration_s / 4 * self._rng.uniform(0.5, 1.0))

    async def keep(self) -> None:
        """Renew the claim; return when another namespace has it, or it could not be renewed in time."""
        loop = asyncio.get_running_loop()
        while loop.time() - self._renewed_s <= self._duration_s * 2 / 3:
            await asyncio.sleep(self._duration_s / 6)
            found = await self._look()
            if found is not None and self._owner_of(found) != self._owner:
                break
            await self._write(found)
        _log.warning("claim_lost", namespace=self._client.namespace, own_namespace=self._owner)

    async def _try(self) -> bool:
        loop = asyncio.get_running_loop()
        found = await self._look()
        other = "" if found is None else self._owner_of(found)
        if found is not None and other not in {"", self._owner}:
            revision = found["metadata"]["resourceVersion"]
            if self._seen[0] != revision:
                self._seen = (revision, loop.time())
            lasts_s = max(self._duration_s, _seconds_of(found))
            if loop.time() - self._seen[1] <= lasts_s:
                self._on_conflict(True)
                _log.error(
                    "namespace_operated_by_another",
                    namespace=self._client.namespace,
                    operator_of=other,
                    own_namespace=self._owner,
                    fix=f"end one of the operators, or give it another --namespace; if that of {other} is gone for good,"
                    f" this one acts {lasts_s:g} s after its last renewal",
                )
                return False
        if not await self._write(found):
            return False
        self._on_conflict(False)
        return True

    async def _look(self) -> Object | None:
        try:
            listing = await self._client.list(CONFIG_MAPS, f"{_LABEL}=operator")
        except Unavailable as error:
            _log.warning("claim_not_read", namespace=self._client.namespace, error=error.message)
            return None
        return next((each for each in listing.objects if each["metadata"]["name"] == CLAIM), None)

    async def _write(self, found: Object | None) -> bool:
        """Create or renew the claim; False on a conflict, or when the API server does not answer."""
        data = {
            "operator": self._owner,
            "seconds": f"{self._duration_s:g}",
            "renewal": f"{self._rng.getrandbits(64):016x}",
        }
        metadata: Object = {"name": CLAIM, "labels": {_LABEL: "operator"}}
        try:
            if found is None:
                body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
                await self._client.create(CONFIG_MAPS, body)
            else:
                revision = {"resourceVersion": found["metadata"]["resourceVersion"]}
                await self._client.patch(CONFIG_MAPS, CLAIM, {"metadata": revision, "data": data})
        except Unavailable as error:
            if not isinstance(error, KubernetesError) or error.status != 409:
                _log.warning("claim_not_written", namespace=self._client.namespace, error=error.message)
            return False
        self._renewed_s = asyncio.get_running_loop().time()
        return True

    @staticmethod
    def _owner_of(found: Object) -> str:
        owner: str = (found.get("data") or {}).get("operator") or ""
        return owner


def _seconds_of(found: Object) -> float:
    """Give the duration in another operator's claim, at most an hour; 0 if it has none."""
    try:
        return min(3600.0, max(0.0, float((found.get("data") or {}).get("seconds") or 0.0)))
    except ValueError:
        return 0.0
