"""Has a worker count what tenants use at all frontends: each frontend asks the same worker, without any agreement."""

import asyncio
from collections.abc import Iterable, Mapping

from penstock.core.errors import PenstockError, Unavailable
from penstock.core.ids import WorkerId
from penstock.core.types.load import PeerCount, TenantCount
from penstock.router.workers.member import FleetMember

ANSWER_S_MAX = 1.0
PASSED_OVER_S = 10.0
"""A worker that did not answer, since it hangs or is of an older version, is asked again after this time."""


class TenantCounting:
    """Asks the connected worker with the lowest id. One event loop owns it."""

    def __init__(self) -> None:
        self._passed_over_s: dict[WorkerId, float] = {}  # by worker: until when

    async def count(
        self, counts: Mapping[str, TenantCount], members: Iterable[FleetMember | None]
    ) -> Mapping[str, PeerCount]:
        """Tell what this frontend's tenants have used, and return what they have used at others.

        Raises:
            Unavailable: no worker is there, or the one asked does not count or answer; the next call asks another one.
        """
        now_s = asyncio.get_running_loop().time()
        self._passed_over_s = {
            each: until_s for each, until_s in self._passed_over_s.items() if until_s > now_s
        }
        there = [
            member
            for member in members
            if member is not None
            and member.listed
            and member.connection is not None
            and member.worker_id not in self._passed_over_s
        ]
        if not there:
            raise Unavailable("no worker is connected that counts what tenants use")
        member = min(there, key=lambda each: each.worker_id)
        assert member.connection is not None, "chosen so"
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                return await member.connection.count_tenants(counts)
        except (PenstockError, TimeoutError) as error:
            self._passed_over_s[member.worker_id] = now_s + PASSED_OVER_S
            raise Unavailable(
                f"worker {member.instance.name} has not counted what tenants use: {str(error) or f'no answer within {ANSWER_S_MAX:g} s'}"
            ) from error
