"""Shares tenants' limits among the frontends of a deployment: each counts what its tenants use at a worker, and hears the others' counts.

No request waits for that. Between two exchanges a frontend knows the others' use as of the last one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from penstock.core.errors import PenstockError
from penstock.core.log import get_logger
from penstock.core.types.load import PeerCount, TenantCount
from penstock.frontend.tenants.tenants import Tenants

PAUSE_S = 0.02
"""Least time between exchanges."""
_TENANT_S = 0.0005
"""The same for each tenant in the last one: eight frontends then take at most 6 % of a core of the worker, measured with 40 and 1,000 tenants."""
BUSY_S, IDLE_S = 0.1, 1.0
"""Most time between exchanges, while limited tenants have requests anywhere and while they have none."""
_log = get_logger()

Count = Callable[[Mapping[str, TenantCount]], Awaitable[Mapping[str, PeerCount]]]


async def share_limits(tenants: Tenants, count: Count) -> None:
    """Exchange what tenants use, for ever.

    Args:
        tenants: of this frontend.
        count: adds this frontend's use of each tenant that has some, and returns what others have used since the last call.
    """
    is_failing = False
    while True:
        tenants.changed.clear()
        uncounted = tenants.uncounted()
        counts = {name: each for name, each in uncounted.items() if each != TenantCount()}
        peers: Mapping[str, PeerCount] = {}
        if uncounted:  # else no tenant has a limit; the key file may name one later
            try:
                peers = await count(counts)
            except PenstockError as error:
                if is_failing:  # what was heard is too old, and a debt of hours would help nobody
                    tenants.counted(counts, {})
                else:
                    _log.warning("limits_not_shared", error=error.message)
                is_failing = True
            else:
                tenants.counted(counts, peers)
                if is_failing:
                    _log.info("limits_shared")
                is_failing = False
        await asyncio.sleep(max(PAUSE_S, _TENANT_S * max(len(counts), len(peers))))
        try:
            async with asyncio.timeout(BUSY_S if counts or peers or is_failing else IDLE_S):
                await tenants.changed.wait()
        except TimeoutError:
            pass
