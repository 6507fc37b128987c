"""Whether several tenants have sent requests lately."""

import math

LATELY_S = 3600.0


class ActiveTenants:
    """Remembers the latest tenant, and when another one was last seen. One event loop owns it."""

    __slots__ = ("_latest", "_other_s", "_seen_s")

    def __init__(self) -> None:
        self._latest: str | None = None
        self._seen_s = -math.inf
        self._other_s = -math.inf

    def seen(self, tenant: str, now_s: float) -> None:
        """Note a request."""
        if tenant != self._latest:
            self._other_s = self._seen_s
            self._latest = tenant
        self._seen_s = now_s

    def are_several(self, now_s: float) -> bool:
        """Say whether at least two tenants have sent requests in the last `LATELY_S` seconds."""
        return now_s - self._other_s <= LATELY_S
